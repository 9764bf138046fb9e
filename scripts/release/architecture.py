"""What a model is, and how Megatron's tensors correspond to Qwen3ForCausalLM's.

Megatron keeps query, key and value of an attention in one matrix, interleaved by query group:
[groups, (heads per group) queries + 1 key + 1 value, head dimension, hidden size]; and the gate and
the up projection of a SwiGLU in another, gate first. transformers keeps them apart. Everything else
only has another name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
QKV = "self_attention.linear_qkv.weight"
GATE_UP = "mlp.linear_fc1.weight"
LAYERS = "decoder.layers."

TOP_LEVEL = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
IN_EACH_LAYER = {  # of a Megatron layer → of a transformers layer
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    QKV: ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
    GATE_UP: ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
}

# What Qwen3ForCausalLM computes; a model that differs cannot be exported as one.
REQUIRED = {
    "position_embedding_type": "rope",
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
}


class ArchitectureError(ValueError):
    """A model is not of Qwen3's architecture; the message names the feature."""


@dataclass(frozen=True)
class Architecture:
    """A Qwen3-shaped model. `vocab_size` counts rows of the embedding, padding included."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    norm_epsilon: float
    tied_embeddings: bool

    @classmethod
    def read(cls, model_file: Path) -> "Architecture":
        """Reads scripts/params/<model>/model.yaml (keys are Megatron's argument names).

        Raises:
            ArchitectureError: a feature that Qwen3ForCausalLM lacks, or a missing key, by name.
        """
        settings: dict[str, Any] = yaml.safe_load(Path(model_file).read_text(encoding="utf-8"))
        for key, required in REQUIRED.items():
            if settings.get(key) != required:
                raise ArchitectureError(
                    f"{model_file}: {key} is {settings.get(key)!r}, "
                    f"but Qwen3ForCausalLM has {required!r}"
                )
        try:
            heads = settings["num_attention_heads"]
            grouped = settings.get("group_query_attention", False)
            return cls(
                num_layers=settings["num_layers"],
                hidden_size=settings["hidden_size"],
                ffn_hidden_size=settings["ffn_hidden_size"],
                num_attention_heads=heads,
                num_query_groups=settings["num_query_groups"] if grouped else heads,
                head_dim=settings.get("kv_channels") or settings["hidden_size"] // heads,
                vocab_size=settings["padded_vocab_size"],
                max_position_embeddings=settings["max_position_embeddings"],
                rotary_base=float(settings["rotary_base"]),
                norm_epsilon=float(settings["norm_epsilon"]),
                tied_embeddings=not settings.get("untie_embeddings_and_output_weights", False),
            )
        except KeyError as error:
            raise ArchitectureError(f"{model_file}: {error.args[0]} is missing") from error

    def settings(self) -> dict[str, Any]:
        """Returns the content of a model.yaml: the reverse of `read`."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "group_query_attention": True,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rotary_base": int(self.rotary_base),
            "norm_epsilon": self.norm_epsilon,
            "untie_embeddings_and_output_weights": not self.tied_embeddings,
            "padded_vocab_size": self.vocab_size,
            **REQUIRED,
        }

    def must_equal(self, other: "Architecture", source: Path) -> None:
        """Refuses another architecture, naming what differs; `source` is where the other stands.

        A longer context than the weights were made for, or a shorter one, is no difference: rotary
        embeddings have no weights.
        """
        differences = [
            f"{field.name} {getattr(self, field.name)} (there: {getattr(other, field.name)})"
            for field in fields(self)
            if field.name != "max_position_embeddings"
            and getattr(self, field.name) != getattr(other, field.name)
        ]
        if differences:
            raise ArchitectureError(f"not the model of {source}: {', '.join(differences)}")

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of query, key and value within one group of Megatron's matrix."""
        return [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]

    def top_level(self) -> dict[str, str]:
        """Megatron's name → transformers' name, of the tensors outside the layers."""
        tied = {OUTPUT} if self.tied_embeddings else set()
        return {name: hf_name for name, hf_name in TOP_LEVEL.items() if name not in tied}

    def megatron_names(self) -> list[str]:
        """The tensors that a checkpoint of this model holds, layers stacked."""
        return [*self.top_level(), *(LAYERS + name for name in IN_EACH_LAYER)]

    def sources(self) -> Iterator[tuple[str, str, torch.Size]]:
        """Yields each tensor of Qwen3ForCausalLM: its name, Megatron's tensor, its shape."""
        hidden, rows = self.hidden_size, self.vocab_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_query_groups * self.head_dim
        shapes = {
            "model.embed_tokens.weight": (rows, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (rows, hidden),
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (self.ffn_hidden_size, hidden),
            "mlp.up_proj.weight": (self.ffn_hidden_size, hidden),
            "mlp.down_proj.weight": (hidden, self.ffn_hidden_size),
        }
        for name, hf_name in self.top_level().items():
            yield hf_name, name, torch.Size(shapes[hf_name])
        for layer in range(self.num_layers):
            for name, suffixes in IN_EACH_LAYER.items():
                for suffix in suffixes:
                    yield hf_layer_name(layer, suffix), LAYERS + name, torch.Size(shapes[suffix])

    def unpack(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Turns one of Megatron's tensors into those of transformers, by name.

        Args:
            name: Megatron's, as in `megatron_names`.
            tensor: the global tensor; of a layer's tensors the stack of all layers. Rows of the
                vocabulary beyond `vocab_size` (padding for tensor parallelism) are dropped.
        """
        if name in TOP_LEVEL:
            rows = self.vocab_size if name in (EMBEDDING, OUTPUT) else tensor.shape[0]
            return {TOP_LEVEL[name]: tensor[:rows]}
        within_layer = name.removeprefix(LAYERS)
        return {
            hf_layer_name(layer, suffix): part
            for layer in range(self.num_layers)
            for suffix, part in zip(
                IN_EACH_LAYER[within_layer], self._split(within_layer, tensor[layer]), strict=True
            )
        }

    def pack(self, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Turns tensors of transformers into one of Megatron's: the reverse of `unpack`.

        Args:
            name: Megatron's, as in `megatron_names`.
            tensors: those of transformers by name, at least the ones that it is made of.
        """
        if name in TOP_LEVEL:
            return tensors[TOP_LEVEL[name]]
        within_layer = name.removeprefix(LAYERS)
        suffixes = IN_EACH_LAYER[within_layer]
        return torch.stack(
            [
                self._join(
                    within_layer, [tensors[hf_layer_name(layer, suffix)] for suffix in suffixes]
                )
                for layer in range(self.num_layers)
            ]
        )

    def _split(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if name == QKV:
            grouped = tensor.view(self.num_query_groups, sum(self.qkv_rows), self.hidden_size)
            parts = grouped.split(self.qkv_rows, dim=1)
            return tuple(part.reshape(-1, self.hidden_size) for part in parts)
        if name == GATE_UP:
            return tensor.chunk(2)
        return (tensor,)

    def _join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if name == QKV:
            grouped = [
                part.view(self.num_query_groups, rows, self.hidden_size)
                for part, rows in zip(parts, self.qkv_rows, strict=True)
            ]
            return torch.cat(grouped, dim=1).view(-1, self.hidden_size)
        return torch.cat(parts)


def hf_layer_name(layer: int, suffix: str) -> str:
    """Returns transformers' name of a tensor of a layer."""
    return f"model.layers.{layer}.{suffix}"
