"""Exports a Megatron checkpoint as a Hugging Face model (Qwen3ForCausalLM in safetensors).

    python scripts/release/export.py --checkpoint RUN/iter_0000100 \\
        --model scripts/params/qwen3_1p7b/model.yaml --tokenizer data/tokenizer \\
        --end-of-document '<|endoftext|>' --output MODEL_DIR

Works on a CPU, with no process group, whatever the parallel sizes that the checkpoint was saved
with. Tensors are streamed: memory holds one safetensors file (at most --max-shard-size) and the
largest stacked tensor of the checkpoint (6 GB in all for qwen3_1p7b in bf16).

The folder holds the weights, config.json, generation_config.json, the tokenizer's files and
export.json (what was exported from where, with digests). It appears whole or not at all. Whether it
computes what Megatron computes is shown by verify_export.py, not assumed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config

from scripts.common.files import read_json, sha256, write_json
from scripts.release.architecture import EMBEDDING, LAYERS, Architecture, ArchitectureError
from scripts.release.arguments import add_checkpoint, parser_of
from scripts.release.checkpoint import Checkpoint, CheckpointError
from scripts.release.folders import replacing_folder
from scripts.release.tokenizer import TokenizerError, copy_tokenizer, end_of_document_id

DTYPES = ("bfloat16", "float16", "float32")
FORMAT_VERSION = 1


def export(
    checkpoint: Checkpoint,
    architecture: Architecture,
    tokenizer: Path,
    output: Path,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    end_of_document: str | None = None,
) -> None:
    """Writes the folder `output`.

    Args:
        checkpoint: the checkpoint to export.
        architecture: the model that it must be.
        tokenizer: folder with tokenizer.json and tokenizer_config.json.
        output: folder to write or to replace.
        dtype: type of the exported weights; None keeps the checkpoint's.
        max_shard_size: largest safetensors file, such as "5GB".
        end_of_document: the token that ends a text; None takes eos_token of tokenizer_config.json.

    Raises:
        CheckpointError: the checkpoint is not of this architecture.
        TokenizerError: the tokenizer lacks a file or the token, or does not fit the model.
    """
    check_tensors(checkpoint, architecture)
    dtype = dtype or checkpoint.dtype
    end_id = end_of_document_id(tokenizer, end_of_document, architecture.vocab_size)
    with replacing_folder(output) as folder:
        parameters = write_weights(checkpoint, architecture, folder, dtype, max_shard_size)
        write_json(folder / "config.json", model_config(architecture, dtype, end_id))
        write_json(folder / "generation_config.json", generation_config(end_id))
        copy_tokenizer(tokenizer, folder)
        provenance = {
            "format_version": FORMAT_VERSION,
            "checkpoint": checkpoint.folder.name,
            "iteration": checkpoint.iteration,
            "averaged": checkpoint.common_state.get("averaged"),
            "parameters": parameters,
            "dtype": str(dtype).removeprefix("torch."),
            "end_of_document_id": end_id,
            "files": {file.name: sha256(file) for file in sorted(folder.iterdir())},
        }
        write_json(folder / "export.json", provenance)


def check_tensors(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Refuses a checkpoint that holds other tensors than the architecture, naming them."""
    expected = set(architecture.megatron_names())
    found = set(checkpoint.tensors)
    if found != expected:
        raise CheckpointError(
            f"{checkpoint.folder} is not the model that was given: "
            f"missing {sorted(expected - found)}, not understood {sorted(found - expected)}"
        )
    layers = {checkpoint.tensors[name].size[0] for name in expected if name.startswith(LAYERS)}
    if layers != {architecture.num_layers}:
        raise CheckpointError(
            f"{checkpoint.folder} has {sorted(layers)} layers, the model {architecture.num_layers}"
        )
    rows, hidden = checkpoint.tensors[EMBEDDING].size
    if rows < architecture.vocab_size or hidden != architecture.hidden_size:
        raise CheckpointError(
            f"{checkpoint.folder}: the embedding is {rows} x {hidden}, "
            f"the model's {architecture.vocab_size} x {architecture.hidden_size}"
        )


def write_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: str,
) -> int:
    """Writes the safetensors files, and their index if there are several; counts the weights."""
    sources = {hf_name: source for hf_name, source, _ in architecture.sources()}
    planned = {
        hf_name: torch.empty(shape, dtype=dtype, device="meta")
        for hf_name, _, shape in architecture.sources()
    }
    plan = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_size)
    total = sum(tensor.numel() for tensor in planned.values())
    with tqdm(total=total, unit="weights", unit_scale=True, desc="export", disable=None) as bar:
        for file_name, hf_names in plan.filename_to_tensors.items():
            shard: dict[str, torch.Tensor] = {}
            wanted = set(hf_names)
            for source in dict.fromkeys(sources[hf_name] for hf_name in hf_names):
                parts = architecture.unpack(source, checkpoint.read(source))
                for hf_name in wanted & parts.keys():
                    part = parts[hf_name]
                    if part.shape != planned[hf_name].shape:
                        raise CheckpointError(
                            f"{checkpoint.folder}: {hf_name} would be {list(part.shape)}, "
                            f"the model's is {list(planned[hf_name].shape)}"
                        )
                    shard[hf_name] = part.to(dtype, copy=True).contiguous()
                    bar.update(part.numel())
            save_file(shard, folder / file_name, metadata={"format": "pt"})
            (folder / file_name).chmod(0o644)  # safetensors makes files that only the owner reads
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return total


def model_config(architecture: Architecture, dtype: torch.dtype, end_id: int) -> dict[str, Any]:
    """Returns the content of config.json."""
    settings = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.ffn_hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_query_groups,
        "head_dim": architecture.head_dim,
        "max_position_embeddings": architecture.max_position_embeddings,
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": architecture.rotary_base},
        "tie_word_embeddings": architecture.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "bos_token_id": end_id,  # as in Qwen3's base models: a text may begin after another's end
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "dtype": str(dtype).removeprefix("torch."),
    }
    # The settings are spelt out also where they equal today's defaults of transformers, and
    # rope_theta is where transformers before 5 and engines built on it look.
    written_by_transformers = Qwen3Config(**settings).to_diff_dict()
    return {**written_by_transformers, **settings, "rope_theta": architecture.rotary_base}


def generation_config(end_id: int) -> dict[str, Any]:
    """Returns the content of generation_config.json: greedy, up to the end of the document."""
    config = GenerationConfig(
        do_sample=False, bos_token_id=end_id, eos_token_id=end_id, pad_token_id=end_id
    )
    return config.to_diff_dict()


def read_export(folder: Path) -> dict[str, Any]:
    """Reads export.json of an exported model.

    Raises:
        CheckpointError: the folder is no export.
    """
    provenance = Path(folder) / "export.json"
    if not provenance.is_file():
        raise CheckpointError(f"{folder} is no exported model: export.json is missing")
    return read_json(provenance)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    add_checkpoint(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's)"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="largest safetensors file")
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="default: eos_token of tokenizer_config.json"
    )
    arguments = parser.parse_args(argv)
    try:
        export(
            Checkpoint(arguments.checkpoint),
            Architecture.read(arguments.model),
            arguments.tokenizer,
            arguments.output,
            getattr(torch, arguments.dtype) if arguments.dtype else None,
            arguments.max_shard_size,
            arguments.end_of_document,
        )
    except (ArchitectureError, CheckpointError, TokenizerError, OSError) as error:
        sys.exit(f"export: {error}")


if __name__ == "__main__":
    main()
