"""Megatron's own GPTModel on a CPU in one process: the reference that an export is compared with.

Only what needs Megatron itself is here: building the model, loading and saving a checkpoint through
`megatron.core.dist_checkpointing`, and computing logits. Nothing of it knows transformers.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import HashStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Megatron says of absent GPU libraries
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig

from scripts.release.architecture import Architecture


@contextmanager
def one_process() -> Iterator[None]:
    """Gives Megatron the process group that it insists on: this process, no port, no GPU.

    Megatron's rotary embedding and its checkpoint writer ask for the current CUDA device; here they
    are told that it is the CPU. Within another `one_process` this one changes nothing.
    """
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
    try:
        with patch.multiple(
            torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build(
    architecture: Architecture, dtype: torch.dtype = torch.float32, **parallel_sizes: int
) -> GPTModel:
    """Builds this process's part of the model with Megatron's plain layers.

    To be called within `one_process`, where the part is the whole; or on several ranks, with the
    sizes that Megatron's parallel state was initialized with.
    """
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **parallel_sizes,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
    ).eval()


def save(model: GPTModel, folder: Path, **common_state: Any) -> None:
    """Writes a torch_dist checkpoint: `folder` must exist and be empty."""
    state = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, **common_state}
    dist_checkpointing.save(state, str(folder))


def load(model: GPTModel, folder: Path) -> None:
    """Loads a checkpoint's weights into the model, converted to the model's type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between Megatron and torch
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(state["model"])


def logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Computes the logits of every position.

    Args:
        model: from `build`.
        tokens: int64 [batch, length].

    Returns:
        float [batch, length, vocabulary].
    """
    length = tokens.shape[1]
    positions = torch.arange(length)[None].expand_as(tokens)
    hidden_from = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)[None, None]
    with torch.no_grad():
        return model(tokens, positions, hidden_from)
