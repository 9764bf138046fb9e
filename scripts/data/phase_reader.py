"""Opens a phase's index: what phase_index.py has written, memory-mapped.

Imports neither Megatron nor PyTorch: whoever asks for a fact about a phase need not wait for them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common.files import read_json
from scripts.data.phase_manifest import Manifest, read_manifest

FORMAT_VERSION = 3
SPLITS = ("train", "valid")


@dataclass(frozen=True)
class PhaseIndex:
    """An index on the disk; phase_index.py describes the arrays, which are memory-mapped.

    Attributes:
        path: the JSON file.
        facts: its content.
        manifest: the shards that the index was built for.
    """

    path: Path
    facts: dict[str, Any]
    manifest: Manifest

    def array(self, name: str) -> np.ndarray:
        """Returns the array of that name, memory-mapped and read-only."""
        return np.load(self.path.parent / self.facts["folder"] / f"{name}.npy", mmap_mode="r")

    def of_documents(self, name: str, split: str) -> np.ndarray:
        """Returns documents, lengths, offsets or ranks of a split's documents, in order."""
        train = self.facts["train"]["documents"]
        return self.array(name)[slice(train) if split == "train" else slice(train, None)]

    def ranks(self, split: str) -> np.ndarray | None:
        """Returns the ranks of a split's documents, or None where the order is not `rank`."""
        return self.of_documents("ranks", split) if self.facts["order"] == "rank" else None

    def samples(self, split: str) -> np.ndarray:
        """Returns where a split's samples begin (place, token), and the end: [samples + 1, 2]."""
        return self.array(f"{split}_samples")

    @property
    def training_samples(self) -> int:
        """Samples of all passes over the training documents."""
        return self.facts["train"]["samples"] * self.facts["passes"]

    def sample_order(self, split: str) -> np.ndarray | range:
        """Returns the order in which a split's samples are read, pass after pass: integers."""
        if split == "train" and "train_order.npy" in self.facts["files"]:
            return self.array("train_order")
        return range(self.facts[split]["samples"])


def read_index(path: Path) -> PhaseIndex:
    """Opens an index and its manifest.

    Raises:
        ValueError: a file is missing, of another version, or the shards have changed since.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing: make the index of this phase first")
    facts = read_json(path)
    if facts.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is not a phase index of version {FORMAT_VERSION}: make it anew")
    manifest = read_manifest(path.parent / facts["manifest"]["file"])
    if manifest.digest != facts["manifest"]["digest"]:
        raise ValueError(
            f"the shards of phase {manifest.phase} have changed since {path} was made "
            f"(manifest {manifest.digest[:16]}, then {facts['manifest']['digest'][:16]}): "
            "make the index anew"
        )
    for name, file in facts["files"].items():
        array = path.parent / facts["folder"] / name
        if not array.is_file() or array.stat().st_size != file["bytes"]:
            raise ValueError(f"{array} is missing or incomplete: make the index anew")
    return PhaseIndex(path, facts, manifest)
