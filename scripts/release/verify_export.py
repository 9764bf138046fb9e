"""Compares an exported model with its checkpoint; an export counts only if this passes.

    python scripts/release/verify_export.py --checkpoint RUN/iter_0000100 \\
        --model scripts/params/qwen3_1p7b/model.yaml --tokenizer data/tokenizer \\
        --export MODEL_DIR --output verification.json

Megatron's own GPTModel and transformers' Qwen3ForCausalLM both run in fp32 on the CPU, on English,
Chinese and code, and on a text as long as the model's context. Compared are: the logits of every
position, the token chosen at every position, the rows of the embedding and of the output layer (bit
by bit: texts touch few of them), greedy continuations, tokenizers, and the number of parameters.

If the export has a narrower type than the checkpoint, Megatron's weights are rounded to it first:
the export is answerable for its arithmetic, not for the rounding that was asked for.

Writes a verdict as JSON and exits with 1 if any check fails. Memory: two models in fp32 and two
models' logits of one long text (about 22 GB in all for qwen3_1p7b).
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel

from scripts.common.files import sha256, write_json
from scripts.release import megatron_model
from scripts.release.architecture import Architecture, ArchitectureError
from scripts.release.arguments import EXPORT, add_checkpoint, parser_of
from scripts.release.checkpoint import Checkpoint, CheckpointError
from scripts.release.export import read_export
from scripts.release.hf_model import Logits, hf_logits, load_model
from scripts.release.tokenizer import TokenizerError, check_files
from scripts.release.verification_texts import TEXTS, long_text

TOLERANCE = 1e-3  # of a logit, fp32; measured: 8e-7 on a small model, more with depth
CONTINUATION_TOKENS = 16
POSITIONS = 256  # compared at a time: the logits of a long text take 2.5 GB


@dataclass(frozen=True)
class TextVerdict:
    """How the two models compare on one text."""

    name: str
    tokens: int
    max_abs_error: float
    argmax_agreement: float  # fraction of positions
    worst_position: int
    passed: bool


def verify(
    checkpoint: Checkpoint,
    architecture: Architecture,
    tokenizer: Path,
    export: Path,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Compares the two models and returns the verdict; `passed` says whether all checks passed.

    To be called within `megatron_model.one_process`.
    """
    provenance = read_export(export)
    dtype = getattr(torch, provenance["dtype"])
    model = load_model(export, torch.float32, "cpu")
    reference = megatron_model.build(architecture)
    megatron_model.load(reference, checkpoint.folder)
    round_weights(reference, dtype)

    samples = tokenized_texts(tokenizer, architecture.max_position_embeddings)
    texts = [compare(name, ids, reference, model, tolerance) for name, ids in samples.items()]
    checks = {
        "logits": all(text.passed for text in texts),
        "vocabulary_rows": same_vocabulary_rows(reference, model, architecture),
        "continuations": all(
            same_continuation(ids, reference, model, tolerance) for ids in samples.values()
        ),
        "tokenizer": same_tokenizer(tokenizer, export),
        "parameters": count(reference) == count(model) == provenance["parameters"],
        "files": all(
            sha256(export / name) == digest for name, digest in provenance["files"].items()
        ),
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "checkpoint": checkpoint.folder.name,
        "iteration": checkpoint.iteration,
        "parameters": count(model),
        "export_dtype": provenance["dtype"],
        "compared_in": "float32",
        "tolerance": tolerance,
        "max_abs_error": max(text.max_abs_error for text in texts),
        "argmax_agreement": min(text.argmax_agreement for text in texts),
        "texts": [asdict(text) for text in texts],
    }


def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Gives the weights the precision of `dtype`, leaving them in fp32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def tokenized_texts(tokenizer: Path, context: int) -> dict[str, list[int]]:
    """Tokenizes the fixed texts; the long one fills the context of the model to the last token."""
    tokens = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = TEXTS | {"full context": long_text(paragraphs=context // 50 + 3)}
    return {name: tokens.encode(text).ids[:context] for name, text in texts.items()}


def compare(
    name: str,
    ids: list[int],
    reference: torch.nn.Module,
    model: PreTrainedModel,
    tolerance: float,
) -> TextVerdict:
    """Compares the logits of every position of one text."""
    tokens = torch.tensor([ids])
    expected, actual = megatron_logits(reference)(tokens)[0], hf_logits(model)(tokens)[0]
    agreement = (expected.argmax(-1) == actual.argmax(-1)).float().mean().item()
    chunks = zip(expected.split(POSITIONS), actual.split(POSITIONS), strict=True)
    errors = torch.cat([(one - other).abs().amax(dim=-1) for one, other in chunks])
    worst = errors.max().item()
    passed = worst <= tolerance  # False for NaN, too
    return TextVerdict(name, len(ids), worst, agreement, int(errors.argmax()), passed)


def megatron_logits(model: torch.nn.Module) -> Logits:
    """Returns Megatron's function from tokens to logits."""
    return lambda tokens: megatron_model.logits(model, tokens)


def same_vocabulary_rows(
    reference: torch.nn.Module, model: PreTrainedModel, architecture: Architecture
) -> bool:
    """Compares the embedding, and the output layer if it is a matrix of its own, bit by bit."""
    pairs = [(reference.embedding.word_embeddings.weight, model.get_input_embeddings().weight)]
    if not architecture.tied_embeddings:
        pairs.append((reference.output_layer.weight, model.get_output_embeddings().weight))
    return all(torch.equal(expected, actual) for expected, actual in pairs)


def same_continuation(
    ids: list[int], reference: torch.nn.Module, model: PreTrainedModel, tolerance: float
) -> bool:
    """Compares greedy continuations of the first half of a text.

    transformers continues with its cache of keys and values; Megatron then says at each new token
    what it would have chosen. Another choice is a failure unless Megatron's two best are closer
    than the tolerance allows to tell apart.
    """
    prompt = torch.tensor([ids[: len(ids) // 2]])
    continued = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=CONTINUATION_TOKENS,
        do_sample=False,
    )
    expected = megatron_logits(reference)(continued)[0, prompt.shape[1] - 1 : -1]
    chosen = continued[0, prompt.shape[1] :, None]
    shortfall = expected.max(dim=-1).values - expected.gather(-1, chosen)[:, 0]
    return bool((shortfall <= 2 * tolerance).all())


def same_tokenizer(tokenizer: Path, export: Path) -> bool:
    """Compares the training tokenizer with what transformers loads from the export."""
    trained = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    exported = AutoTokenizer.from_pretrained(export)
    return all(
        trained.encode(text, add_special_tokens=False).ids
        == exported.encode(text, add_special_tokens=False)
        and trained.decode(trained.encode(text).ids) == exported.decode(exported.encode(text))
        for text in [*TEXTS.values(), long_text(paragraphs=30)]
    )


def count(model: torch.nn.Module) -> int:
    """Counts parameters; tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    add_checkpoint(parser)
    parser.add_argument("--export", type=Path, required=True, help=EXPORT)
    parser.add_argument("--output", type=Path, required=True, help="verdict, JSON")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="of a logit (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        checkpoint = Checkpoint(arguments.checkpoint)
        architecture = Architecture.read(arguments.model)
        check_files(arguments.tokenizer)
        read_export(arguments.export)
    except (ArchitectureError, CheckpointError, TokenizerError) as error:
        sys.exit(f"verify_export: {error}")
    with megatron_model.one_process():
        verdict = verify(
            checkpoint, architecture, arguments.tokenizer, arguments.export, arguments.tolerance
        )
    write_json(arguments.output, verdict)
    print(
        f"max abs error {verdict['max_abs_error']:.2g} (tolerance {arguments.tolerance:g}), "
        f"argmax agreement {verdict['argmax_agreement']:.4%}, "
        f"{verdict['parameters']:,} parameters: {arguments.output}"
    )
    failed = [name for name, passed in verdict["checks"].items() if not passed]
    if failed:
        sys.exit(
            f"verify_export: {arguments.export} is not the model of {arguments.checkpoint}: "
            f"{', '.join(failed)} differ"
        )


if __name__ == "__main__":
    main()
