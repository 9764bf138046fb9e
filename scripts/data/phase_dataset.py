"""The phase as Megatron's training loop sees it: one data set, whatever its number of shards.

`build_datasets` is for a data set provider of Megatron. It opens an index (phase_index.py) and
returns data sets whose sample i is always the same one: Megatron's sampler hands out samples in
ascending order, global batch by global batch, so the samples of an iteration depend neither on the
number of data-parallel ranks nor on where a run was resumed.

    train, valid, test = build_datasets(
        Path("data/converted/megatron_phase3.index.json"), train_samples=1000, valid_samples=64
    )

The class is Megatron's GPTDataset (masks, positions, labels) over a low-level data set that reads
from many shards; the order, the samples and their shuffle come from the index and are not built.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import _FileBinReader
from megatron.core.datasets.utils import Split

from scripts.data.phase_manifest import Manifest
from scripts.data.phase_reader import PhaseIndex, read_index


class OrderedDocuments:
    """The documents of a split over all shards, numbered in training order.

    Offers what Megatron's GPTDataset asks of its low-level data set. Tokens are read by Megatron's
    own reader of `.bin` files, the one without memory maps: documents that follow each other lie in
    different shards, and mapping (or keeping open) one of 50,000 files for each document costs 5 to
    20 times as much as reading it (benchmarks/order.py). No handle stays open.

    Args:
        index: an open phase index.
        split: train or valid.
    """

    def __init__(self, index: PhaseIndex, split: str) -> None:
        self.manifest = index.manifest
        self.documents, self.sequence_lengths, self.offsets = (
            index.of_documents(name, split) for name in ("documents", "lengths", "offsets")
        )
        self._first_documents = index.manifest.first_documents.tolist()
        self._dtype = np.dtype(index.manifest.common["dtype"])
        self._reader = lru_cache(maxsize=None)(partial(open_shard, index.manifest))

    def __len__(self) -> int:
        return len(self.documents)

    def get(self, place: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Returns tokens of a document, from `offset` on; all that remain without `length`.

        Args:
            place: the document's place in the training order.
        """
        shard = bisect_right(self._first_documents, self.documents[place]) - 1
        count = self.sequence_lengths[place] - offset if length is None else length
        first_byte = self.offsets[place] + offset * self._dtype.itemsize
        return self._reader(shard).read(self._dtype, int(count), int(first_byte))


def open_shard(manifest: Manifest, shard: int) -> _FileBinReader:
    """Returns Megatron's reader of a shard's tokens.

    Raises:
        ValueError: a file is missing, or not the one that the manifest was made of.
    """
    path, stated = Path(f"{manifest.prefixes[shard]}.bin"), manifest.table["bin_bytes"][shard]
    if not path.is_file() or path.stat().st_size != stated.as_py():
        raise ValueError(
            f"{path} is missing or has not the {stated} bytes of {manifest.path}: convert this "
            "shard again, or make the manifest and the index of this phase anew"
        )
    return _FileBinReader(str(path))


@dataclass(frozen=True)
class EndOfDocument:
    """All that GPTDataset asks of a tokenizer; the index knows it.

    There is no padding token: Qwen's is also its end-of-document token, whose loss Megatron would
    leave out.
    """

    eod: int
    vocab_size: int | None = None
    unique_identifiers: dict = field(default_factory=dict)


class PhaseDataset(GPTDataset):
    """Megatron's GPTDataset of one split of a phase, in the index's order.

    The validation split is read again from its beginning after every `cycle` samples, so that each
    evaluation sees the same ones.

    Args:
        index: an open phase index.
        split: Split.train or Split.valid.
        config: Megatron's.
        num_samples: how many samples will be asked for.
        cycle: samples after which the data repeat; None: never.
    """

    def __init__(
        self,
        index: PhaseIndex,
        split: Split,
        config: GPTDatasetConfig,
        num_samples: int,
        cycle: int | None = None,
    ) -> None:
        self.phase_index = index
        self.cycle = cycle
        documents = OrderedDocuments(index, split.name)
        super().__init__(
            documents, str(index.path), documents.documents, num_samples, split, config
        )

    def _build_document_sample_shuffle_indices(
        self,
    ) -> tuple[range, np.ndarray, np.ndarray | range]:
        split = self.index_split.name
        return (
            range(len(self.dataset)),
            self.phase_index.samples(split),
            self.phase_index.sample_order(split),
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is not None and self.cycle is not None:
            idx %= self.cycle
        return super().__getitem__(idx)


def build_datasets(
    index_path: Path,
    train_samples: int,
    valid_samples: int = 0,
    samples_per_evaluation: int | None = None,
    *,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    inter_document_masking: bool = False,
    create_attention_mask: bool = False,
) -> tuple[PhaseDataset, PhaseDataset | None, None]:
    """Returns the training, validation and test data sets of a phase.

    Args:
        index_path: the index's JSON file.
        train_samples: samples that the phase trains on, from the phase's beginning.
        valid_samples: samples of all evaluations of the run together; 0: no validation.
        samples_per_evaluation: samples of one evaluation (evaluation iterations × batch); each
            evaluation then reads the same ones.
        reset_position_ids, reset_attention_mask, eod_mask_loss, inter_document_masking,
            create_attention_mask: as GPTDatasetConfig's.

    Raises:
        ValueError: the index is stale, or the phase is shorter than `train_samples`.
    """
    index = read_index(index_path)
    if train_samples > index.training_samples:
        raise ValueError(
            f"phase {index.manifest.phase} is to train on {train_samples} samples, its data hold "
            f"{index.training_samples} in {index.facts['passes']} pass(es): shorten its `length` "
            "in data.yaml, allow more `passes`, or add data"
        )
    config = GPTDatasetConfig(
        random_seed=index.facts["seed"],
        sequence_length=index.facts["sequence_length"],
        blend=([str(index.path)], None),
        split="1,0,0",
        tokenizer=EndOfDocument(index.manifest.common["end_of_document_id"]),
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        inter_document_masking=inter_document_masking,
        create_attention_mask=create_attention_mask and not inter_document_masking,
    )
    train = PhaseDataset(index, Split.train, config, train_samples)
    held_out = index.facts["valid"]["samples"]
    if not valid_samples or not held_out:
        return train, None, None
    cycle = min(samples_per_evaluation or held_out, held_out)
    return train, PhaseDataset(index, Split.valid, config, valid_samples, cycle), None
