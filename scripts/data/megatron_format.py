"""Megatron's indexed data set: `.bin` (token ids, no header) and `.idx` (where each document lies).

One sequence per document, as Megatron's own preprocessing writes it. Little endian:

    offset      bytes  content
    0           9      MMIDIDX, two zero bytes
    9           8      uint64 version = 1
    17          1      uint8 code of the ids' dtype (4 = int32, 8 = uint16)
    18          8      uint64 sequences S
    26          8      uint64 entries of document_indices D = S + 1
    34          4 S    int32 tokens of each sequence, end of document included
    34 +  4 S   8 S    int64 byte offset of each sequence in .bin
    34 + 12 S   8 D    int64 document_indices = 0 … S

Source: megatron/core/datasets/indexed_dataset.py (core_v0.19.0).
"""

import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPE_CODES = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}
UINT16_VOCABULARY = 65_500  # Megatron's limit: vocabularies below it are stored as uint16
LONGEST_DOCUMENT = 2**31 - 1  # tokens: lengths are int32


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Returns the dtype that Megatron stores ids of such a vocabulary in."""
    return np.dtype(np.uint16 if vocabulary_size < UINT16_VOCABULARY else np.int32)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Writes an `.idx` file for documents of `lengths` tokens ((documents,), integers)."""
    lengths = np.asarray(lengths, np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    offsets = np.concatenate([[0], ends[:-1]]) if lengths.size else ends
    with Path(path).open("wb") as file:
        code = DTYPE_CODES[dtype]
        file.write(HEADER.pack(MAGIC, VERSION, code, lengths.size, lengths.size + 1))
        for array in (
            lengths.astype("<i4"),
            offsets.astype("<i8"),
            np.arange(lengths.size + 1, dtype="<i8"),
        ):
            file.write(array.data)
