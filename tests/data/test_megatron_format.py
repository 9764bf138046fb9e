import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from scripts.data.megatron_format import index_bytes, read_index, token_dtype

LENGTHS = {"none": [], "one": [1], "some": [3, 1, 70_000, 2]}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_index_is_byte_for_byte_megatrons(tmp_path, dtype, lengths):
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for length in lengths:
        builder.add_document(torch.arange(length), [length])
    builder.finalize(str(tmp_path / "theirs.idx"))

    theirs = (tmp_path / "theirs.idx").read_bytes()
    assert index_bytes(np.array(lengths, np.int32), np.dtype(dtype)) == theirs
    read_dtype, read_lengths = read_index(tmp_path / "theirs.idx")
    assert (read_dtype, read_lengths.tolist()) == (dtype, lengths)


def test_megatron_reads_an_index_past_four_gigabytes(tmp_path):
    lengths = np.full(3, 600_000_000, np.int32)
    (tmp_path / "big.idx").write_bytes(index_bytes(lengths, np.dtype(np.int32)))
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 4)  # a sparse file
    dataset = IndexedDataset(str(tmp_path / "big"))
    assert dataset.get(2, offset=599_999_999, length=1).tolist() == [0]
    assert dataset.index.sequence_pointers.tolist() == [0, 2_400_000_000, 4_800_000_000]


@pytest.mark.parametrize("size", [100, 65_499, 65_500, 65_536, 151_936])
def test_dtype_is_the_one_megatron_chooses(size):
    assert token_dtype(size) == DType.optimal_dtype(size)


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (0, b"X", "is not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "dtype code 7"),
        (18, b"\x03", "not those of 3 documents"),
        (34, b"\x04", "do not follow from the lengths"),
        (42, b"\x01", "do not follow from the lengths"),
        (-1, b"\x01", "do not follow from the lengths"),
    ],
)
def test_damage_of_an_index_is_found(tmp_path, position, value, said):
    content = bytearray(index_bytes(np.array([3, 5]), np.dtype(np.int32)))
    content[position : position + 1 or None] = value
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x.idx.*{said}"):
        read_index(tmp_path / "x.idx")
