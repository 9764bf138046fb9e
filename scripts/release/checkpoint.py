"""Reads Megatron's torch_dist checkpoints tensor by tensor, without a process group.

A checkpoint of this format holds global tensors, whatever the tensor, pipeline and data parallel
sizes that it was saved with. The layers of the decoder are stacked: `decoder.layers.mlp.linear_fc2.
weight` has the layer as its leading dimension. Names of layer norms are Transformer Engine's also
when the layers were plain ones.
"""

import io
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.common.files import read_json

COMMON_STATE = "common_state/shard_0_1"  # arguments, iteration and the like, pickled
OTHER_STATE = ("optimizer.", "chained_", "rng_state")  # what is not the model


class CheckpointError(ValueError):
    """A folder is not the checkpoint that was expected; the message says why."""


class Checkpoint:
    """One `iter_XXXXXXX` folder, given by its path or by the marker of the phase that it ends.

    Raises:
        CheckpointError: the folder is no torch_dist checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        folder = Path(folder)
        self.folder = Path(read_json(folder)["checkpoint"]) if folder.is_file() else folder
        description = self.folder / "metadata.json"  # Megatron writes it last
        if not description.is_file():
            raise CheckpointError(
                f"{folder} is no complete Megatron checkpoint: {description.name} is missing. "
                "Give a folder iter_XXXXXXX of a run, not the run's folder."
            )
        backend = read_json(description).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} has the format {backend}; only torch_dist can be read")
        self._reader = FileSystemReader(str(self.folder))
        self._metadata = self._reader.read_metadata()

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The model's tensors by name, with `.size` and `.properties.dtype`."""
        return {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(OTHER_STATE)
        }

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights as saved."""
        return self.tensors["embedding.word_embeddings.weight"].properties.dtype

    def read(self, name: str) -> torch.Tensor:
        """Reads one global tensor, in the type in which it was saved."""
        entry = self.tensors[name]
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        self._load(state)
        return state[name]

    @cached_property
    def common_state(self) -> dict[str, Any]:
        """What is not a tensor: `args`, `iteration`, `checkpoint_version` …; {} if not there."""
        if COMMON_STATE not in self._metadata.state_dict_metadata:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Megatron says of absent GPU libraries
            # Imported for its effect: it adds Megatron's types to those that torch.load trusts.
            import megatron.core.safe_globals  # noqa: F401

        state: dict[str, Any] = {COMMON_STATE: io.BytesIO()}
        self._load(state)
        loaded = state[COMMON_STATE]
        if isinstance(loaded, io.BytesIO):
            loaded.seek(0)
            loaded = torch.load(loaded, weights_only=True)
        return loaded[0]

    @property
    def iteration(self) -> int | None:
        """The iteration at which it was saved, as the checkpoint itself says."""
        return self.common_state.get("iteration")

    def _load(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group is the intent
            distributed_checkpoint.load(state, storage_reader=self._reader, no_dist=True)
