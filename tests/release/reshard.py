"""Rewrites a checkpoint as two parallel ranks save it; run under torchrun by test_parallel.py.

Usage: reshard.py CHECKPOINT MODEL_YAML OUTPUT (writes OUTPUT/tensor and OUTPUT/pipeline)
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from scripts.release.architecture import Architecture


def build(architecture, **parallel):
    """This rank's part of the model."""
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
        **parallel,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=architecture.tied_embeddings,
    )


def main(checkpoint, model_file, output):
    torch.distributed.init_process_group("gloo")
    architecture = Architecture.read(Path(model_file))
    for kind in ("tensor", "pipeline"):
        sizes = {f"{kind}_model_parallel_size": 2}
        parallel_state.initialize_model_parallel(**sizes)
        model = build(architecture, **sizes)
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
        model.load_state_dict(state["model"])
        folder = Path(output) / kind
        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        torch.distributed.barrier()
        content = {"model": model.sharded_state_dict(), "iteration": 7, "checkpoint_version": 3.0}
        dist_checkpointing.save(content, str(folder))
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with patch.multiple(
        torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None
    ):
        main(*sys.argv[1:])
