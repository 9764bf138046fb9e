"""Imports a Hugging Face Qwen3 model as a Megatron checkpoint to continue from.

    python scripts/release/import_hf.py --hf Qwen3-1.7B --output artifacts/checkpoints/qwen3_1p7b

The reverse of export.py, on a CPU, with no process group. Weights keep their type, and an export of
the result has them bit by bit. --output is a folder like a run's: `release/` with the weights, the
tracker, and model.yaml, the settings that train this model (a folder of scripts/params needs them).
Begin a run with it by Megatron's `--pretrained-checkpoint OUTPUT` (runtime.extra_arguments), which
counts only while the run has no checkpoint of its own; the optimiser begins anew.

A model that computes something else than plain Qwen3 is refused, with the features by name. With
--model, one whose settings differ from that model.yaml is refused too. Memory: the model.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from tqdm import tqdm

from scripts.common.files import read_json
from scripts.release.architecture import Architecture, ArchitectureError
from scripts.release.arguments import parser_of
from scripts.release.checkpoint import RELEASE, write
from scripts.release.folders import replacing_folder
from scripts.train.checkpoints import TRACKER

# Settings of config.json that change what is computed, and the values that Megatron's model has.
PLAIN = {
    "model_type": ["qwen3"],
    "hidden_act": ["silu"],
    "attention_bias": [False, None],
    "use_sliding_window": [False, None],
    "rope_scaling": [None],
    "final_logit_softcapping": [None],
    "attn_logit_softcapping": [None],
    "quantization_config": [None],
}


def read_architecture(folder: Path) -> Architecture:
    """Reads config.json of a Hugging Face model.

    Raises:
        ArchitectureError: features that Megatron's model of this project lacks, by name.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ArchitectureError(f"{folder} is no Hugging Face model: config.json is missing")
    config: dict[str, Any] = read_json(file)
    unsupported = [
        f"{key} {config[key]!r}"
        for key, allowed in PLAIN.items()
        if key in config and config[key] not in allowed
    ]
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        unsupported.append(f"rope_type {rope['rope_type']!r}")
    if unsupported:
        raise ArchitectureError(f"{file} asks for what is not supported: {', '.join(unsupported)}")
    try:
        heads = config["num_attention_heads"]
        return Architecture(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rotary_base=float(rope["rope_theta"] if rope else config["rope_theta"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            tied_embeddings=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ArchitectureError(f"{file}: {error.args[0]} is missing") from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """Finds the safetensors file of each tensor."""
    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    if not files:
        raise ArchitectureError(f"{folder} holds no safetensors files")
    return files


def check_tensors(folder: Path, architecture: Architecture, files: dict[str, Path]) -> None:
    """Refuses a model with other tensors than Qwen3's, such as those of more norms, by name."""
    expected = {name: list(shape) for name, _, shape in architecture.sources()}
    found = {}
    for name, file in files.items():
        with safe_open(file, "pt") as tensors:
            found[name] = tensors.get_slice(name).get_shape()
    if architecture.tied_embeddings:
        found.pop("lm_head.weight", None)  # some writers store a tied matrix twice
    if found != expected:
        wrong = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
        raise ArchitectureError(
            f"{folder} is not a plain Qwen3 model: not supported {sorted(found - expected.keys())},"
            f" missing {sorted(expected - found.keys())}, of another shape {sorted(wrong)}"
        )


def import_hf(folder: Path, architecture: Architecture, output: Path) -> None:
    """Writes the weights of a Hugging Face model as a Megatron checkpoint."""
    files = tensor_files(folder)
    check_tensors(folder, architecture, files)
    parts: dict[str, list[str]] = {}
    for hf_name, name, _ in architecture.sources():
        parts.setdefault(name, []).append(hf_name)

    packed = {}
    for name, hf_names in tqdm(parts.items(), unit="tensor", desc="import", disable=None):
        packed[name] = architecture.pack(
            name, {hf_name: read(files[hf_name], hf_name) for hf_name in hf_names}
        )
    state = {"checkpoint_version": 3.0, "iteration": 0}
    with replacing_folder(output) as run:
        (run / RELEASE).mkdir()
        write(run / RELEASE, packed, architecture.num_layers, state)
        settings = yaml.safe_dump(architecture.settings(), sort_keys=False)
        (run / "model.yaml").write_text(settings, encoding="utf-8")
        (run / TRACKER).write_text(RELEASE, encoding="ascii")


def read(file: Path, name: str) -> torch.Tensor:
    """Reads one tensor."""
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--hf", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--model", type=Path, help="model.yaml that it must be")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    try:
        architecture = read_architecture(arguments.hf)
        if arguments.model:
            architecture.must_equal(Architecture.read(arguments.model), arguments.model)
        import_hf(arguments.hf, architecture, arguments.output)
    except (ArchitectureError, OSError) as error:
        sys.exit(f"import_hf: {error}")


if __name__ == "__main__":
    main()
