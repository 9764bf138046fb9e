import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.data import parquet_text
from scripts.data.parquet_text import ParquetError, ParquetTexts

TEXTS = ["one", None, "zwei\r\n", "", "三\x00", "e\u0301", "\u0301", "👩‍👩‍👧", "four" * 500]
KEPT = [text for text in TEXTS if text]


def read(path, text_key="text", batch_rows=1000, **options):
    """Returns the documents of a file, batch by batch."""
    source = ParquetTexts(path, text_key, **options)
    return [source.documents(first, table) for first, table in source.batches(batch_rows)]


def texts(path, *arguments, **options):
    return [text for batch in read(path, *arguments, **options) for text in batch.texts]


def write(tmp_path, table, **options):
    path = tmp_path / "part-00000.parquet"
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)
def test_every_type_of_text_column_gives_the_same_documents(tmp_path, kind):
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    array = pa.array([t if t is None else t.encode() for t in TEXTS], pa.binary())
    array = pc.cast(array, plain) if plain != pa.binary() else array
    array = array.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array
    [batch] = read(write(tmp_path, {"text": array}))
    assert batch.texts == KEPT
    assert batch.rows.tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert (batch.null, batch.empty, batch.invalid_utf8) == (1, 1, 0)


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_every_codec_and_page_version_is_read(tmp_path, codec, version):
    path = write(tmp_path, {"text": TEXTS}, compression=codec, data_page_version=version)
    assert texts(path) == KEPT


@pytest.mark.parametrize("rows_per_group", [1, 3, 1_000_000])
@pytest.mark.parametrize("batch_rows", [1, 2, 7, 1000])
def test_row_groups_and_batches_do_not_change_what_is_read(tmp_path, rows_per_group, batch_rows):
    many = [f"{i} {text}" if text else text for i, text in enumerate(TEXTS * 50)]
    table = {"text": many, "rank": np.arange(len(many))[::-1] / 7}
    path = write(tmp_path, table, row_group_size=rows_per_group)
    batches = read(path, batch_rows=batch_rows)
    kept = [i for i, text in enumerate(many) if text]
    assert [text for batch in batches for text in batch.texts] == [many[i] for i in kept]
    assert np.concatenate([batch.rows for batch in batches]).tolist() == kept
    assert np.array_equal(np.concatenate([b.ranks for b in batches]), table["rank"][kept])
    assert all(len(b.texts) + b.null + b.empty <= batch_rows for b in batches)


def test_other_columns_and_their_order_do_not_matter(tmp_path):
    table = {
        "meta": [{"text": "nested", "rank": 1.0, "tags": ["a"]}] * len(TEXTS),
        "rank": np.arange(len(TEXTS), dtype=np.float32),
        "texts": ["other"] * len(TEXTS),
        "text": TEXTS,
        "n": range(len(TEXTS)),
    }
    path = write(tmp_path, table)
    assert texts(path) == KEPT
    assert texts(path, "texts") == ["other"] * len(TEXTS)
    [batch] = read(path)
    assert batch.ranks.tolist() == [0, 2, 4, 5, 6, 7, 8]


def test_missing_ranks_are_nan_and_whole_numbers_are_ranks(tmp_path):
    [batch] = read(write(tmp_path, {"text": ["a", "b"], "rank": pa.array([3, None], pa.int64())}))
    assert batch.ranks.dtype == np.float64
    assert batch.ranks[0] == 3
    assert np.isnan(batch.ranks[1])


def test_a_file_without_rows_gives_nothing(tmp_path):
    assert read(write(tmp_path, {"text": pa.array([], pa.string())})) == []


INVALID = [b"fine", b"broken \xff\xfe end", b"\xed\xa0\x80", None, b"cut \xe4\xb8"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_string()], ids=str)
def test_invalid_utf8_is_an_error_that_names_row_and_byte(tmp_path, kind):
    path = write(tmp_path, {"text": unchecked(INVALID, kind)})
    with pytest.raises(ParquetError, match=r"part-00000.parquet, row 1: .* at byte 7 .*replace"):
        read(path)


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_string()], ids=str)
def test_invalid_utf8_is_replaced_where_that_is_set(tmp_path, kind):
    path = write(tmp_path, {"text": unchecked(INVALID, kind)})
    [batch] = read(path, replace_invalid_utf8=True)
    assert batch.texts == [text.decode(errors="replace") for text in INVALID if text]
    assert batch.invalid_utf8 == 3
    assert batch.null == 1


def unchecked(values, kind):
    """Makes a string array out of bytes as a careless writer would: without a look at them."""
    large = kind == pa.large_string()
    array = pa.array(values, pa.large_binary() if large else pa.binary())
    return (
        array if kind == pa.binary() else pa.Array.from_buffers(kind, len(array), array.buffers())
    )


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"content": ["x"]}, "no single column 'text'; it has: content .string."),
        ({"text": [1.5]}, "column 'text' holds double, not text"),
        ({"text": [["x"]]}, "column 'text' holds list<.*>, not text"),
        ({"text": ["x"], "rank": ["low"]}, "column 'rank' holds string, not numbers"),
        ({"text": ["x"], "rank": [2**53 + 1]}, "not in range"),
    ],
)
def test_unusable_columns_are_named(tmp_path, columns, said):
    path = write(tmp_path, columns)
    with pytest.raises(ParquetError, match=said) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(ParquetError, match="no single column 'text'"):
        read(write(tmp_path, table))


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "header", "no footer"])
def test_damaged_files_are_errors_that_name_the_file(tmp_path, damage):
    path = write(tmp_path, {"text": [f"{i} text" * 50 for i in range(5000)]})
    whole = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b'{"text": "not Parquet"}',
            "cut": whole[: len(whole) // 2],
            "header": whole[:-8] + b"\xff\xff\xff\x7fPAR1",
            "no footer": whole[:-8],
        }[damage]
    )
    with pytest.raises(ParquetError, match=r"part-00000.parquet is not a readable Parquet file"):
        read(path)


def test_a_page_with_another_checksum_is_an_error_that_says_where(tmp_path):
    rows = [f"{i} text" * 50 for i in range(5000)]
    path = write(tmp_path, {"text": rows}, write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    position = content.index(b"3000 text3000 text")
    content[position] ^= 1  # still valid text: only the checksum knows
    path.write_bytes(content)
    with pytest.raises(ParquetError, match=r"part-00000.parquet, at or after row \d+: .*checksum"):
        read(path)


def test_memory_is_bounded_by_rows_where_a_dictionary_hides_long_documents(tmp_path):
    path = write(tmp_path, {"text": ["x" * 900_000] * 2000})
    source = ParquetTexts(path, "text")
    sizes = [table.nbytes for _, table in source.batches(1000)]
    assert len(sizes) > 20
    assert max(sizes) < 80e6


def test_batches_hold_a_few_megabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_text, "BATCH_BYTES", 100_000)
    path = write(tmp_path, {"text": ["x" * 1_000] * 1_000 + ["y" * 300_000] + ["z"] * 1_000})
    sizes = [table.nbytes for _, table in ParquetTexts(path, "text").batches(1_000)]
    assert sum(size > 110_000 for size in sizes) <= 1  # the long document's


wild_texts = st.lists(
    st.one_of(st.none(), st.text(max_size=40), st.sampled_from(TEXTS)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(
    rows=wild_texts,
    rows_per_group=st.integers(1, 70),
    batch_rows=st.integers(1, 70),
    dictionary=st.booleans(),
    page=st.sampled_from([64, 1 << 20]),
)
def test_documents_are_what_pandas_reads(
    tmp_path_factory, rows, rows_per_group, batch_rows, dictionary, page
):
    path = write(
        tmp_path_factory.mktemp("wild"),
        {"text": pa.array(rows, pa.string())},
        row_group_size=rows_per_group,
        use_dictionary=dictionary,
        data_page_size=page,
    )
    expected = [text for text in pd.read_parquet(path)["text"].tolist() if isinstance(text, str)]
    batches = read(path, batch_rows=batch_rows)
    assert [text for batch in batches for text in batch.texts] == [t for t in expected if t]
    assert sum(batch.empty for batch in batches) == expected.count("")
    assert sum(batch.null for batch in batches) == rows.count(None)
