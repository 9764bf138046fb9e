"""Which transformer layers a run takes: `layers: auto | fast | transformer_engine | local`.

fast: this project's (torch and Triton); transformer_engine: NVIDIA's, with tensor and context
parallelism and FP8; local: Megatron's own unfused ones, for anything else. No Megatron is imported
here, so that a launcher can choose without waiting for it.
"""

import importlib.util
from dataclasses import dataclass

FAST_SPEC = ("scripts.train.layers.modules", "fast_spec")
NO_FUSIONS = [  # Megatron's own, which need Transformer Engine or Apex
    *("--no-rope-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion"),
    "--no-gradient-accumulation-fusion",
]
ARGUMENTS = {
    "fast": ["--transformer-impl", "local", "--spec", *FAST_SPEC, *NO_FUSIONS],
    "transformer_engine": [
        *("--transformer-impl", "transformer_engine", "--attention-backend", "fused"),
        *("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"),
        "--no-gradient-accumulation-fusion",  # the output layer's needs Apex
    ],
    "local": ["--transformer-impl", "local", "--cross-entropy-loss-fusion", *NO_FUSIONS],
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The layers of a run: their name, why they were taken, and Megatron's arguments for them."""

    name: str
    reason: str

    @property
    def arguments(self) -> list[str]:
        """Megatron's command line for these layers."""
        return ARGUMENTS[self.name]


def choose(
    requested: str,
    gpus: int,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    fp8: bool = False,
) -> Choice:
    """Settles the setting `layers` for a run.

    Args:
        requested: auto, fast, transformer_engine or local.
        gpus: GPUs of the run; 0 is a run on the CPU.
        tensor_parallel: tensor-parallel size.
        context_parallel: context-parallel size.
        fp8: whether the products run in FP8.

    Raises:
        ValueError: the requested layers cannot do it on this machine.
    """
    installed = {name: importlib.util.find_spec(name) for name in ("triton", "transformer_engine")}
    refusals = {"local": "FP8 needs transformer_engine" if fp8 else None}
    refusals["fast"] = refusals["local"]
    if gpus and not installed["triton"]:
        refusals["fast"] = "triton is not installed"
    if tensor_parallel > 1 or context_parallel > 1:
        refusals["fast"] = "tensor or context parallelism needs transformer_engine or local"
    refusals["transformer_engine"] = None
    if not gpus:
        refusals["transformer_engine"] = "it needs a GPU"
    elif not installed["transformer_engine"]:
        refusals["transformer_engine"] = (
            "it is not installed (pip install transformer_engine[pytorch])"
        )

    if requested != "auto":
        if requested not in refusals:
            raise ValueError(f"layers: {requested} is none of auto, {', '.join(ARGUMENTS)}")
        if refusal := refusals[requested]:
            raise ValueError(f"layers: {requested} is not possible here: {refusal}")
        return Choice(requested, "requested")
    for name in ARGUMENTS:  # the fastest first
        if not refusals[name]:
            skipped = [f"{other}: {why}" for other, why in refusals.items() if why]
            return Choice(name, "auto" + (f" ({'; '.join(skipped)})" if skipped else ""))
    raise ValueError(f"layers: auto finds none: {refusals}")
