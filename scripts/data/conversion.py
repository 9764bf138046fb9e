"""One Parquet file to one Megatron shard: decode, tokenize and write, overlapped and in order."""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa

from scripts.common import files
from scripts.data.engines import Engine, TokenizerFolder
from scripts.data.megatron_format import LONGEST_DOCUMENT, write_index
from scripts.data.parquet_text import ParquetTexts
from scripts.data.shard_files import ShardFiles, writing

BYTES_IN_FLIGHT = 16 << 20  # text that is read and not yet written, unless one document is longer


@dataclass(frozen=True)
class Settings:
    """What a shard's content depends on, besides the file and the tokenizer."""

    text_key: str
    end_of_document_id: int
    replace_invalid_utf8: bool
    batch_rows: int
    threads: int


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch: ids with the ends of documents, lengths, ranks and counts."""

    ids: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray | None
    counts: Counter


def tokenize(
    engine: Engine,
    source: ParquetTexts,
    first: int,
    table: pa.Table,
    settings: Settings,
    tokenizer: TokenizerFolder,
) -> Tokens:
    """Returns the tokens of a batch of rows that begins at row `first`."""
    documents = source.documents(first, table)
    ids, ends = engine.encode(documents.texts)
    lengths = np.diff(ends, prepend=0) + 1
    if lengths.size and lengths.max() > LONGEST_DOCUMENT:
        row = documents.rows[lengths.argmax()]
        raise ValueError(f"{source.path}, row {row}: {lengths.max()} tokens do not fit int32")
    spliced = np.insert(ids, ends, settings.end_of_document_id).astype(tokenizer.dtype, copy=False)
    counts = Counter(
        documents=len(documents.texts),
        tokens=spliced.size,
        null=documents.null,
        empty=documents.empty,
        invalid_utf8=documents.invalid_utf8,
        special_token_text=count_texts(documents.texts, tokenizer.special_tokens),
    )
    return Tokens(spliced, lengths.astype(np.int32), documents.ranks, counts)


def count_texts(texts: list[str], special_tokens: list[str]) -> int:
    """Returns how often special tokens occur in texts, as text."""
    suspects = [text for text in texts if any(token in text for token in special_tokens)]
    return sum(text.count(token) for text in suspects for token in special_tokens)


def in_order(
    pool: ThreadPoolExecutor,
    source: ParquetTexts,
    settings: Settings,
    work: Callable[[int, pa.Table], Tokens],
) -> Iterator[Tokens]:
    """Yields work(first row, table) of each batch in order, with bounded text in flight."""
    waiting: deque[tuple[Future, int]] = deque()
    in_flight = 0
    try:
        for first, table in source.batches(settings.batch_rows):
            while waiting and (
                in_flight + table.nbytes > BYTES_IN_FLIGHT or len(waiting) > settings.threads
            ):
                future, size = waiting.popleft()
                yield future.result()
                in_flight -= size
            waiting.append((pool.submit(work, first, table), table.nbytes))
            in_flight += table.nbytes
        while waiting:
            yield waiting.popleft()[0].result()
    finally:
        for future, _ in waiting:
            future.cancel()


def convert(
    path: Path, shard: ShardFiles, tokenizer: TokenizerFolder, settings: Settings, recipe: dict
) -> dict:
    """Converts one file and returns the content of its sidecar.

    `recipe` (shards.conversion_recipe) is recorded in it: what the shard depends on, in words.
    """
    started = time.monotonic()
    source = ParquetTexts(path, settings.text_key, settings.replace_invalid_utf8)
    engine = tokenizer.fast
    with writing(shard) as partial, ThreadPoolExecutor(settings.threads + 1) as pool:
        source_digest = pool.submit(files.sha256, path)
        counts, lengths, ranks, digest = Counter(), [], [], sha256()
        with partial.bin.open("wb") as file:
            for tokens in in_order(
                pool,
                source,
                settings,
                lambda first, table: tokenize(engine, source, first, table, settings, tokenizer),
            ):
                file.write(tokens.ids.data)
                digest.update(tokens.ids.data)
                counts.update(tokens.counts)
                lengths.append(tokens.lengths)
                ranks.append(tokens.ranks)
        write_index(partial.idx, np.concatenate([np.empty(0, np.int32), *lengths]), tokenizer.dtype)
        rank = write_ranks(partial.ranks, ranks) if source.has_rank else None
        sidecar = {
            "recipe": recipe,
            "source": {
                "file": path.name,
                "bytes": path.stat().st_size,
                "sha256": source_digest.result(),
            },
            "rows": source.rows,
            "documents": counts["documents"],
            "tokens": counts["tokens"],
            "skipped": {"null": counts["null"], "empty": counts["empty"]},
            "invalid_utf8": counts["invalid_utf8"],
            "special_token_text": counts["special_token_text"],
            "end_of_document_id": settings.end_of_document_id,
            "tokenizer_sha256": tokenizer.sha256,
            "engine": engine.name,
            "engine_version": engine.version,
            "dtype": tokenizer.dtype.name,
            "bin": {"bytes": partial.bin.stat().st_size, "sha256": digest.hexdigest()},
            "idx": {"bytes": partial.idx.stat().st_size, "sha256": files.sha256(partial.idx)},
            "rank": rank,
            "seconds": round(time.monotonic() - started, 3),
        }
        partial.sidecar.write_text(json.dumps(sidecar, indent=2) + "\n", encoding="utf-8")
    return sidecar


def write_ranks(path: Path, ranks: list[np.ndarray]) -> dict[str, float] | None:
    """Writes the documents' ranks, float64 (documents,), and returns their range."""
    joined = np.concatenate([np.empty(0), *ranks])
    with path.open("wb") as file:
        np.save(file, joined)
    known = joined[~np.isnan(joined)]
    return {"min": known.min(), "max": known.max()} if known.size else None
