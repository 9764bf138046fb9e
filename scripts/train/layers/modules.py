"""Megatron's transformer layer with fused operations, as a spec for `--spec`.

The modules are Megatron's own classes with another forward pass: parameters, their names and the
checkpoint keys are those of Megatron's local layers, so checkpoints are interchangeable. They are
for training: a call that needs a mask or a key-value cache is refused. Packed sequences (documents
that do not see each other) are taken as one row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn

from scripts.train.layers import functions
from scripts.train.layers.choice import FAST_SPEC

# What the fused operations compute; anything else is refused, never approximated.
REQUIRED = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "activation_func_clamp_value": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "attention_output_gate": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "rotary_interleaved": False,
    "window_size": None,
    "no_rope_freq": None,
    "softmax_type": "vanilla",
    "apply_query_key_layer_scaling": False,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "use_mup": False,
    "fp32_residual_connection": False,
    "fp8": None,
}


def unsupported(config: TransformerConfig) -> list[str]:
    """Names the settings of `config` that the fused layers do not compute, as "name=value"."""
    refused = [name for name, value in REQUIRED.items() if getattr(config, name, value) != value]
    if config.recompute_granularity == "selective":
        refused.append("recompute_granularity")
    return [f"{name}={getattr(config, name)}" for name in refused]


class RMSNorm(nn.Module):
    """RMSNorm, fp32 inside. Parameter: `weight` [hidden]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the normalized states."""
        return functions.rms_norm(hidden_states, None, self.weight, self.eps)[0]


class ResidualRMSNorm(RMSNorm):
    """RMSNorm that also adds the branch before it and hands on the residual."""

    def forward(self, hidden_states: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the normalized sum and the sum: Megatron's (output, residual)."""
        return functions.rms_norm(hidden_states, branch, self.weight, self.eps)


class FusedGradientColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear whose weight gradient is accumulated in the product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return functions.linear(input, weight)


class FusedGradientRowLinear(RowParallelLinear):
    """RowParallelLinear whose weight gradient is accumulated in the product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return functions.linear(input, weight)


class CausalAttention(nn.Module):
    """Core attention through torch's scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal or attention_type != "self":
            raise ValueError(
                f"layers: fast computes causal self-attention, not {attn_mask_type.name} "
                f"{attention_type}-attention; use layers: local"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams | None
    ) -> Tensor:
        """Returns [s, b, heads * d] of query [s, b, heads, d], key and value [s, b, groups, d]."""
        if packed is None:
            return functions.causal_attention(query, key, value, self.softmax_scale)
        return functions.document_attention(
            query, key, value, self.softmax_scale, packed.cu_seqlens_q, packed.max_seqlen_q
        )


class FusedSelfAttention(SelfAttention):
    """SelfAttention with split, QK-norm and rotation in one kernel."""

    def forward(
        self, hidden_states: Tensor, angles: Tensor, packed: PackedSeqParams | None
    ) -> tuple[Tensor, None]:
        """Returns the attention's output [s, b, h] and no bias; `angles` is [s, 1, 1, d]."""
        if packed is not None:
            angles = functions.document_angles(angles, packed.cu_seqlens_q)
        if angles.shape[-1] != self.hidden_size_per_attention_head:
            raise ValueError("layers: fast rotates whole heads: set rotary_percent to 1.0")
        qkv, _ = self.linear_qkv(hidden_states)
        query, key, value = functions.qk_norm_rope(
            qkv,
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            angles,
            self.num_attention_heads_per_partition,
            self.config.layernorm_epsilon,
        )
        return self.linear_proj(self.core_attention(query, key, value, packed))


class FusedMLP(MLP):
    """MLP with a fused SwiGLU."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns the MLP's output [s, b, h] and no bias."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(functions.swiglu(gate_up))


class FusedTransformerLayer(TransformerLayer):
    """TransformerLayer with the residual add inside the second norm."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the layer's output [s, b, h] and the (unused) cross-attention context."""
        refused = {
            "an attention mask": attention_mask is not None,
            "a key-value cache": inference_context is not None,
            "a model without rotation": rotary_pos_emb is None,
        }
        if any(refused.values()):
            names = ", ".join(name for name, present in refused.items() if present)
            raise ValueError(f"layers: fast does not compute {names}; use layers: local")
        normed, residual = self.input_layernorm(hidden_states)
        attention, _ = self.self_attention(normed, rotary_pos_emb, packed_seq_params)
        normed, residual = self.pre_mlp_layernorm(residual, attention)
        output, _ = self.mlp(normed)
        return residual + output, context


def fast_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Builds the fused layers for `--spec scripts.train.layers.modules fast_spec`.

    Args:
        config: Megatron's TransformerConfig, or a model config that holds one as `transformer`.
        vp_stage: virtual pipeline stage.

    Raises:
        ValueError: the model needs something that the fused layers do not compute.
    """
    config = getattr(config, "transformer", config)
    if refused := unsupported(config):
        raise ValueError(
            f"layers: fast does not support {', '.join(refused)}; "
            "set layers: transformer_engine or layers: local"
        )
    layer = ModuleSpec(
        module=FusedTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=ResidualRMSNorm,
            self_attention=ModuleSpec(
                module=FusedSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=FusedGradientColumnLinear,
                    core_attention=CausalAttention,
                    linear_proj=FusedGradientRowLinear,
                    q_layernorm=WrappedTorchNorm,
                    k_layernorm=WrappedTorchNorm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=ResidualRMSNorm,
            mlp=partial(
                FusedMLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=FusedGradientColumnLinear, linear_fc2=FusedGradientRowLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_local_checkpoint_keys(),
        ),
    )
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _local_checkpoint_keys() -> dict[str, str]:
    """Returns the checkpoint keys of Megatron's local layers (those of Transformer Engine's)."""
    return get_gpt_layer_local_submodules(normalization="RMSNorm").sharded_state_dict_keys_map


def fused_loss(
    *,
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    labels: Tensor,
    **_: Any,
) -> Tensor:
    """Output layer and loss in one: GPTModel's `output_processor` for training.

    Args:
        hidden_states: [s, b, h] from the decoder.
        output_layer: the model's.
        output_weight: the embedding's weight where the two are tied.
        labels: [b, s].

    Returns:
        The loss of each token, fp32 [b, s].
    """
    weight = output_layer.weight if output_weight is None else output_weight
    loss = functions.linear_cross_entropy(hidden_states, weight, labels.t())
    return loss.t().contiguous()


def output_processor(spec: list[str] | None) -> Callable[..., Tensor] | None:
    """Returns the forward step's `output_processor` for Megatron's argument `--spec`."""
    return fused_loss if spec and tuple(spec) == FAST_SPEC else None
