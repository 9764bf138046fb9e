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


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """Returns the content of `.idx` for documents of `lengths` tokens ((documents,), integers)."""
    lengths = np.asarray(lengths, "<i4")
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    offsets = ends - lengths * np.int64(dtype.itemsize)
    boundaries = np.arange(lengths.size + 1, dtype="<i8")
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], lengths.size, boundaries.size)
    return b"".join([header, lengths, offsets, boundaries])


def read_index(path: Path) -> tuple[np.dtype, np.ndarray]:
    """Returns the ids' dtype and the documents' lengths in tokens, int32 (documents,).

    Raises ValueError where the file is not what `write_index` would write for these lengths.
    """
    content = Path(path).read_bytes()
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise ValueError(f"{path} is not a Megatron index")
    _, version, code, sequences, _ = HEADER.unpack_from(content)
    dtypes = {code: dtype for dtype, code in DTYPE_CODES.items()}
    if version != VERSION or code not in dtypes:
        raise ValueError(f"{path}: version {version} or dtype code {code} is not known here")
    if len(content) != HEADER.size + 20 * sequences + 8:
        raise ValueError(f"{path} has {len(content)} bytes, not those of {sequences} documents")
    lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
    if content != index_bytes(lengths, dtypes[code]):
        raise ValueError(f"{path}: offsets or document boundaries do not follow from the lengths")
    return dtypes[code], lengths
