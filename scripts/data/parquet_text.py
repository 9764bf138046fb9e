"""Documents out of a Parquet file: in batches of bounded memory, with what was skipped."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

RANK_KEY = "rank"
READ_BUFFER = 1 << 20  # bytes; without pre-buffering: a row group is never held whole
READ_ROWS = 64  # rows decoded at once: bounds the memory where a dictionary repeats long documents
READ_BYTES = 1 << 20  # text decoded at once, where rows are long
BATCH_BYTES = 1 << 20  # text in a batch: fits the cache, and work per batch is negligible


class ParquetError(ValueError):
    """A Parquet file that cannot be used; the message names the file and the place."""


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, and what was not taken.

    Attributes:
        texts: the documents.
        rows: their rows in the file, int64 (documents,).
        ranks: their ranks, float64 (documents,), NaN where missing; None without a rank column.
        null: rows without text.
        empty: rows with empty text.
        invalid_utf8: documents in which invalid bytes were replaced.
    """

    texts: list[str]
    rows: np.ndarray
    ranks: np.ndarray | None
    null: int
    empty: int
    invalid_utf8: int


class ParquetTexts:
    """The text column, and the ranks where there are any, of one Parquet file."""

    def __init__(self, path: Path, text_key: str, replace_invalid_utf8: bool = False) -> None:
        self.path = path
        self.text_key = text_key
        self.replace_invalid_utf8 = replace_invalid_utf8
        try:
            self.file = pq.ParquetFile(
                path, pre_buffer=False, buffer_size=READ_BUFFER, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise ParquetError(f"{path} is not a readable Parquet file: {error}") from error
        schema = self.file.schema_arrow
        self._check_text(schema)
        self._check_rank(schema)
        self.rows = self.file.metadata.num_rows
        self.has_rank = RANK_KEY in schema.names

    def _check_text(self, schema: pa.Schema) -> None:
        index = schema.get_field_index(self.text_key)
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if index < 0:
            raise ParquetError(
                f"{self.path} has no single column {self.text_key!r}; it has: {columns}. "
                "Set text_key to the column that holds the text"
            )
        if not is_text(schema.field(index).type):
            raise ParquetError(
                f"{self.path}: column {self.text_key!r} holds {schema.field(index).type}, "
                f"not text; the file has: {columns}"
            )

    def _check_rank(self, schema: pa.Schema) -> None:
        kind = schema.field(RANK_KEY).type if RANK_KEY in schema.names else pa.float64()
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise ParquetError(f"{self.path}: column {RANK_KEY!r} holds {kind}, not numbers")

    def batches(self, batch_rows: int) -> Iterator[tuple[int, pa.Table]]:
        """Yields (first row, table of text and perhaps ranks), at most `batch_rows` rows each."""
        columns = [self.text_key] + [RANK_KEY] * self.has_rank
        first, row, size, parts = 0, 0, 0, []
        try:
            for group in range(self.file.metadata.num_row_groups):
                for part in self.file.iter_batches(
                    batch_size=min(self._read_rows(group), batch_rows),
                    row_groups=[group],
                    columns=columns,
                    use_threads=False,
                ):
                    if parts and (
                        row + part.num_rows - first > batch_rows or size + part.nbytes > BATCH_BYTES
                    ):
                        yield first, pa.Table.from_batches(parts)
                        first, size, parts = row, 0, []
                    parts.append(part)
                    row += part.num_rows
                    size += part.nbytes
        except (pa.ArrowException, OSError) as error:
            raise ParquetError(f"{self.path}, at or after row {row}: {error}") from error
        if parts:
            yield first, pa.Table.from_batches(parts)

    def _read_rows(self, group: int) -> int:
        """Returns how many rows of a row group to decode at once."""
        metadata = self.file.metadata.row_group(group)
        size = max(
            metadata.column(column).total_uncompressed_size
            for column in range(metadata.num_columns)
            if metadata.column(column).path_in_schema == self.text_key
        )
        return max(1, min(READ_ROWS, READ_BYTES * metadata.num_rows // max(size, 1)))

    def documents(self, first: int, table: pa.Table) -> Documents:
        """Returns the documents of a batch that begins at row `first` of the file."""
        texts, invalid = self._texts(first, table[self.text_key])
        ranks = self._ranks(first, table[RANK_KEY]) if self.has_rank else None
        null, empty = texts.count(None), texts.count("")
        kept = np.arange(len(texts))
        if null or empty:
            kept = np.array([i for i, text in enumerate(texts) if text], np.int64)
            texts = [text for text in texts if text]
            ranks = ranks[kept] if ranks is not None else None
        return Documents(texts, first + kept, ranks, null, empty, invalid)

    def _ranks(self, first: int, column: pa.ChunkedArray) -> np.ndarray:
        """Returns the ranks as float64, NaN where they are missing."""
        try:
            return column.cast(pa.float64()).to_numpy()
        except pa.ArrowInvalid as error:
            place = f"{self.path}, column {RANK_KEY!r}, at or after row {first}"
            raise ParquetError(f"{place}: {error}") from error

    def _texts(self, first: int, column: pa.ChunkedArray) -> tuple[list[str | None], int]:
        """Returns the column as strings, and in how many documents bytes were replaced."""
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not is_binary(column.type):
            try:
                return column.to_pylist(), 0
            except UnicodeDecodeError:
                column = column.cast(pa.large_binary())
        texts, invalid = [], 0
        for row, content in enumerate(column.to_pylist(), first):
            try:
                texts.append(None if content is None else content.decode())
            except UnicodeDecodeError as error:
                if not self.replace_invalid_utf8:
                    raise ParquetError(
                        f"{self.path}, row {row}: invalid UTF-8 at byte {error.start} of the text; "
                        "set invalid_utf8 to 'replace' to accept such documents"
                    ) from error
                texts.append(content.decode(errors="replace"))
                invalid += 1
        return texts, invalid


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold the text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return is_binary(kind) or any(test(kind) for test in strings)


def is_binary(kind: pa.DataType) -> bool:
    """Whether values of this type are bytes without a promise to be UTF-8."""
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)
