"""Reads and writes Megatron's torch_dist checkpoints, without a process group.

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
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.common.files import read_json, sha256, write_json
from scripts.train.checkpoints import INTEGRITY, TRACKER, folder_of, tracked_iteration

RELEASE = "release"  # Megatron's folder for weights that no run of it made; the tracker says so
DESCRIPTION = "metadata.json"  # Megatron writes it last
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON_STATE = "common_state/shard_0_1"  # arguments, iteration and the like, pickled
OTHER_STATE = ("optimizer.", "chained_", "rng_state")  # what is not the model
# Objects that Megatron insists on, one a layer, and that are empty unless FP8 is used.
WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


class CheckpointError(ValueError):
    """A folder is not the checkpoint that was expected; the message says why."""


class Checkpoint:
    """One checkpoint to read.

    Args:
        path: an `iter_XXXXXXX` folder; a run's folder, which stands for the checkpoint that its
            tracker names; or the marker of a phase, for the checkpoint that the phase ends with.

    Raises:
        CheckpointError: the folder is no torch_dist checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.folder = locate(Path(path))
        description = self.folder / DESCRIPTION
        if not description.is_file():
            raise CheckpointError(
                f"{self.folder} is no complete Megatron checkpoint: {DESCRIPTION} is missing"
            )
        backend = read_json(description).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(f"{self.folder} is {backend}, not torch_dist")
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


def locate(path: Path) -> Path:
    """Returns the folder of the checkpoint that a path stands for; see `Checkpoint`."""
    if path.is_file():
        return Path(read_json(path)["checkpoint"])
    if (path / TRACKER).is_file():
        iteration = tracked_iteration(path)
        return path / RELEASE if iteration is None else folder_of(path, iteration)
    return path


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    num_layers: int,
    common_state: dict[str, Any],
) -> None:
    """Writes a checkpoint that Megatron loads as one of its own, without an optimiser's state.

    Args:
        folder: where; it must exist and be empty.
        tensors: global tensors by Megatron's names, layers stacked.
        num_layers: how many they are.
        common_state: `iteration`, `checkpoint_version`, and `args` where there are any.
    """
    state: dict[str, Any] = {**tensors, COMMON_STATE: [common_state]}
    for name in WITH_EXTRA_STATE:
        for layer in range(num_layers):
            extra_state = f"decoder.layers.{name}._extra_state/shard_{layer}_{num_layers}"
            state[extra_state] = [None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is the intent
        distributed_checkpoint.save(
            state,
            storage_writer=FileSystemWriter(str(folder)),
            planner=DefaultSavePlanner(flatten_state_dict=False),  # lists stay lists, as Megatron's
            no_dist=True,
        )
    write_json(Path(folder) / DESCRIPTION, BACKEND)
    files = {file.name: sha256(file) for file in sorted(Path(folder).iterdir())}
    write_json(Path(folder) / INTEGRITY, {"algorithm": "sha256", "files": files})
