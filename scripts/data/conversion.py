"""One Parquet file to one Megatron shard: decode, tokenize and write, overlapped and in order."""

import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from os.path import commonprefix
from pathlib import Path

import numpy as np
import pyarrow as pa

from scripts.common import files
from scripts.data.engines import Engine, EngineError, TokenizerFolder
from scripts.data.exactness import Inexact, audit, check, hard_texts
from scripts.data.megatron_format import LONGEST_DOCUMENT, index_bytes
from scripts.data.parquet_text import BATCH_BYTES, ParquetTexts
from scripts.data.shard_files import ShardFiles, writing

BATCHES_PER_THREAD = 3  # of BATCH_BYTES, read and not yet written, unless a document is longer
ENGINES = ("auto", "fastokens", "tokenizers")


@dataclass(frozen=True)
class Tokenization:
    """How text becomes tokens.

    Attributes:
        tokenizer: the tokenizer.
        end_of_document_id: appended to each document.
        engine: gives the ids.
        fallback: whether the reference may take over from the engine.
        fell_back: why it did.
    """

    tokenizer: TokenizerFolder
    end_of_document_id: int
    engine: Engine
    fallback: bool = False
    fell_back: str | None = None

    def on_reference(self, reason: object) -> "Tokenization":
        """Returns the same with the reference as engine."""
        return replace(self, engine=self.tokenizer.reference, fallback=False, fell_back=str(reason))


def tokenization(tokenizer: TokenizerFolder, end_of_document: str, engine: str) -> Tokenization:
    """Chooses the engine: `auto` takes the fast one where it loads and agrees on the hard texts."""
    if engine != "tokenizers":
        tokenizer.load()
    reference = Tokenization(
        tokenizer, tokenizer.token_id(end_of_document), engine=tokenizer.reference
    )
    if engine == "tokenizers":
        return reference
    try:
        check(tokenizer.fast, tokenizer.reference, hard_texts(tokenizer.special_tokens))
    except (EngineError, Inexact) as error:
        if engine == "fastokens":
            raise
        return reference.on_reference(error)
    return replace(reference, engine=tokenizer.fast, fallback=engine == "auto")


@dataclass(frozen=True)
class Settings:
    """How files are read.

    Attributes:
        recipe: what a shard depends on besides its file (shards.conversion_recipe); recorded in it.
        batch_rows: most rows of a batch.
        threads: batches of a file that are tokenized at once.
    """

    recipe: dict
    batch_rows: int = 1_000
    threads: int = 2


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch.

    Attributes:
        ids: ids with the ends of documents, in the shard's dtype, (tokens,).
        lengths: tokens of each document, its end included, int32 (documents,).
        ranks: float64 (documents,), or None.
        counts: what the sidecar counts.
    """

    ids: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray | None
    counts: Counter


@dataclass(frozen=True)
class Content:
    """What a shard's `.bin` holds.

    Attributes:
        counts: what the sidecar counts.
        lengths: tokens of each document, its end included, int32 (documents,).
        ranks: float64 (documents,), or None.
        bin_sha256: the file's digest.
    """

    counts: Counter
    lengths: np.ndarray
    ranks: np.ndarray | None
    bin_sha256: str


def convert(
    path: Path,
    shard: ShardFiles,
    how: Tokenization,
    settings: Settings,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object] = lambda rows: None,
) -> dict:
    """Converts one file and returns the content of its sidecar.

    The pool's threads tokenize. All files of a job share it: fastokens' caches belong to threads.

    Raises:
        ValueError: the file, or a document in it, cannot be used.
        OSError: reading or writing failed; nothing is left under the final names.
    """
    with writing(shard) as unfinished:
        try:
            return write_shard(path, unfinished, how, settings, pool, progress)
        except (Inexact, EngineError) as error:
            if not how.fallback:
                raise
            return write_shard(path, unfinished, how.on_reference(error), settings, pool, progress)


def finished(path: Path, shard: ShardFiles, recipe: dict) -> bool:
    """Says whether a shard is whole and was made by this recipe of what the file holds now.

    A file is read again only where its status has changed since then: unlike the time stamp of its
    content, that of its status cannot be set back.
    """
    try:
        sidecar = files.read_json(shard.sidecar)
        written, source = shard.sidecar.stat(), path.stat()
        return (
            sidecar["recipe"] == recipe
            and sidecar["bin"]["bytes"] == shard.bin.stat().st_size
            and sidecar["idx"]["bytes"] == shard.idx.stat().st_size
            and (sidecar["rank"] is None or shard.ranks.exists())
            and sidecar["source"]["bytes"] == source.st_size
            and (
                source.st_ctime_ns <= written.st_mtime_ns
                or sidecar["source"]["sha256"] == files.sha256(path)
            )
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # a shard that is not there, or whose sidecar is damaged


def write_shard(
    path: Path,
    shard: ShardFiles,
    how: Tokenization,
    settings: Settings,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object],
) -> dict:
    """Writes all files of a shard with one engine and returns the content of its sidecar."""
    started = time.monotonic()
    state = file_state(path)
    source = ParquetTexts(
        path,
        settings.recipe["text_key"],
        replace_invalid_utf8=settings.recipe["invalid_utf8"] == "replace",
    )
    source_digest = pool.submit(files.sha256, path)
    content = write_tokens(shard.bin, source, how, settings, pool, progress)
    if file_state(path) != state:
        raise ValueError(f"{path} changed while it was read; run again when it is complete")
    index = index_bytes(content.lengths, how.tokenizer.dtype)
    shard.idx.write_bytes(index)
    rank = None if content.ranks is None else write_ranks(shard.ranks, content.ranks)
    sidecar = {
        "recipe": settings.recipe,
        "source": {
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": source_digest.result(),
        },
        "rows": content.counts["rows"],
        "documents": content.counts["documents"],
        "tokens": content.counts["tokens"],
        "skipped": {key: content.counts[key] for key in ("null", "empty")},
        "invalid_utf8": content.counts["invalid_utf8"],
        "special_token_text": content.counts["special_token_text"],
        "end_of_document_id": how.end_of_document_id,
        "tokenizer_sha256": settings.recipe["tokenizer_sha256"],
        "engine": how.engine.name,
        "engine_version": how.engine.version,
        "fell_back": how.fell_back,
        "audited": content.counts["audited"],
        "dtype": how.tokenizer.dtype.name,
        "bin": {"bytes": shard.bin.stat().st_size, "sha256": content.bin_sha256},
        "idx": {"bytes": len(index), "sha256": sha256(index).hexdigest()},
        "rank": rank,
        "seconds": round(time.monotonic() - started, 3),
    }
    shard.sidecar.write_text(json.dumps(sidecar, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return sidecar


def write_tokens(
    path: Path,
    source: ParquetTexts,
    how: Tokenization,
    settings: Settings,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object],
) -> Content:
    """Writes `.bin` and returns what the other files of the shard need."""
    counts, lengths, ranks, digest = Counter(), [np.empty(0, np.int32)], [np.empty(0)], sha256()
    with path.open("wb") as file:
        for tokens in in_order(pool, source, settings, partial(tokenize, how, source)):
            file.write(tokens.ids.data)
            digest.update(tokens.ids.data)
            counts.update(tokens.counts)
            lengths.append(tokens.lengths)
            if tokens.ranks is not None:
                ranks.append(tokens.ranks)
            progress(tokens.counts["rows"])
    return Content(
        counts,
        np.concatenate(lengths),
        np.concatenate(ranks) if source.has_rank else None,
        digest.hexdigest(),
    )


def in_order(
    pool: ThreadPoolExecutor,
    source: ParquetTexts,
    settings: Settings,
    work: Callable[[int, pa.Table], Tokens],
) -> Iterator[Tokens]:
    """Yields work(first row, rows) of each batch in order, with bounded text in flight."""
    waiting: deque[tuple[Future, int]] = deque()
    in_flight, most = 0, BATCHES_PER_THREAD * settings.threads * BATCH_BYTES
    for first, table in source.batches(settings.batch_rows):
        while waiting and in_flight + table.nbytes > most:
            future, size = waiting.popleft()
            yield future.result()
            in_flight -= size
        waiting.append((pool.submit(work, first, table), table.nbytes))
        in_flight += table.nbytes
    while waiting:
        yield waiting.popleft()[0].result()


def tokenize(how: Tokenization, source: ParquetTexts, first: int, table: pa.Table) -> Tokens:
    """Returns the tokens of a batch of rows that begins at row `first`."""
    documents = source.documents(first, table)
    ids, ends = how.engine.encode(documents.texts)
    lengths = np.diff(ends, prepend=0) + 1
    if lengths.size and lengths.max() > LONGEST_DOCUMENT:
        row = documents.rows[lengths.argmax()]
        raise ValueError(f"{source.path}, row {row}: {lengths.max()} tokens are too many for .idx")
    audited = 0
    if how.engine is not how.tokenizer.reference:
        audited = audit(
            how.engine, how.tokenizer.reference, documents, ids, ends, place=str(source.path)
        )
    spliced = np.insert(ids, ends, how.end_of_document_id)
    counts = Counter(
        rows=table.num_rows,
        documents=len(documents.texts),
        tokens=spliced.size,
        null=documents.null,
        empty=documents.empty,
        invalid_utf8=documents.invalid_utf8,
        special_token_text=occurrences(how.tokenizer.special_tokens, documents.texts),
        audited=audited,
    )
    dtype = how.tokenizer.dtype
    return Tokens(
        spliced.view(dtype) if dtype.itemsize == spliced.itemsize else spliced.astype(dtype),
        lengths.astype(np.int32),
        documents.ranks,
        counts,
    )


def occurrences(special_tokens: list[str], texts: list[str]) -> int:
    """Returns how often special tokens stand in texts."""
    if not special_tokens:
        return 0
    pattern = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    # The "|" of "<|", for example: a character is found far faster than a pattern.
    shared = commonprefix(special_tokens)[-1:]  # noqa: RUF071 (of characters is what is meant)
    return sum(len(pattern.findall(text)) for text in texts if shared in text)


def file_state(path: Path) -> tuple[int, int, int]:
    """Returns what changes when a file is replaced or written to."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def write_ranks(path: Path, ranks: np.ndarray) -> dict[str, float | int | None]:
    """Writes the documents' ranks, float64 (documents,); returns their range and the gaps."""
    with path.open("wb") as file:
        np.save(file, ranks)
    return rank_range(ranks)


def rank_range(ranks: np.ndarray) -> dict[str, float | int | None]:
    """Returns the range of the ranks, float64 (documents,), and how many are missing."""
    known = ranks[np.isfinite(ranks)]
    return {
        "min": known.min() if known.size else None,
        "max": known.max() if known.size else None,
        "missing": ranks.size - known.size,
    }
