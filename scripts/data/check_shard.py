r"""Reads converted shards again and says what is wrong with them.

Sizes against the index, digests against the sidecar, ids below the vocabulary, the end of document
at the end of each document and nowhere else, ranks, and random documents decoded and compared with
the Parquet file where it is still there.

    python scripts/data/check_shard.py --folder data/converted/megatron_phase1 \
        --tokenizer-model data/tokenizer --parquet-dir data/parquet/phase1

Exits with 1 where a shard is not right.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts.common.files import read_json, sha256
from scripts.data.conversion import rank_range
from scripts.data.engines import TokenizerFolder
from scripts.data.megatron_format import read_index
from scripts.data.parquet_text import ParquetTexts
from scripts.data.shard_files import ShardFiles

CHUNK = 1 << 22  # ids looked at at once


@dataclass(frozen=True)
class Reference:
    """What shards are compared with.

    Attributes:
        tokenizer: the tokenizer of the run.
        parquet: the folder of the phase's Parquet files, or None.
        documents: how many random documents of a shard are decoded.
        seed: which ones.
    """

    tokenizer: TokenizerFolder
    parquet: Path | None
    documents: int
    seed: int


def check_shard(shard: ShardFiles, reference: Reference) -> list[str]:
    """Returns what is wrong with a shard, each finding in one line."""
    try:
        sidecar = read_json(shard.sidecar)
        dtype, lengths = read_index(shard.idx)
        ids = np.memmap(shard.bin, dtype, "r") if shard.bin.stat().st_size else np.empty(0, dtype)
        findings = [*differences(shard, sidecar, dtype, lengths)]
        if ids.size != lengths.sum(dtype=np.int64):
            return [*findings, f"{shard.bin} has {ids.size} tokens, its index {lengths.sum()}"]
        findings += wrong_ids(shard, sidecar, ids, lengths, reference.tokenizer)
        findings += wrong_ranks(shard, sidecar)
        if reference.parquet and not findings:
            findings += wrong_texts(shard, sidecar, ids, lengths, reference)
        return findings
    except FileNotFoundError as error:
        return [f"{error.filename} is missing"]
    except KeyError as error:
        return [f"{shard.sidecar} lacks {error}"]
    except (ValueError, OSError) as error:
        return [f"{shard.prefix}: {error}"]


def differences(
    shard: ShardFiles, sidecar: dict, dtype: np.dtype, lengths: np.ndarray
) -> Iterator[str]:
    """Yields where the sidecar says something else than the files."""
    actual = {
        "dtype": dtype.name,
        "documents": lengths.size,
        "tokens": lengths.sum(dtype=np.int64),
        "bin": {"bytes": shard.bin.stat().st_size, "sha256": sha256(shard.bin)},
        "idx": {"bytes": shard.idx.stat().st_size, "sha256": sha256(shard.idx)},
    }
    for key, value in actual.items():
        if sidecar[key] != value:
            yield f"{shard.prefix}: {key} is {value}, its sidecar says {sidecar[key]}"
    skipped = sum(sidecar["skipped"].values())
    if sidecar["rows"] != sidecar["documents"] + skipped:
        yield f"{shard.sidecar}: {sidecar['rows']} rows are not its documents and {skipped} skipped"


def wrong_ids(
    shard: ShardFiles,
    sidecar: dict,
    ids: np.ndarray,
    lengths: np.ndarray,
    tokenizer: TokenizerFolder,
) -> Iterator[str]:
    """Yields ids outside the vocabulary and ends of documents that are not where they belong."""
    if sidecar["recipe"]["tokenizer_sha256"] != tokenizer.sha256:
        yield f"{shard.prefix} was made with another tokenizer than {tokenizer.file}"
        return
    end = sidecar["end_of_document_id"]
    ends = np.cumsum(lengths, dtype=np.int64) - 1
    if lengths.size and lengths.min() < 2:
        yield f"{shard.idx}: document {lengths.argmin()} has no text"
    elif (missing := np.flatnonzero(ids[ends] != end)).size:
        yield f"{shard.bin}: document {missing[0]} does not end with {end} ({missing.size} such)"
    found, largest, smallest = 0, -1, 0
    for start in range(0, ids.size, CHUNK):
        chunk = ids[start : start + CHUNK]
        found += np.count_nonzero(chunk == end)
        largest, smallest = max(largest, chunk.max()), min(smallest, chunk.min())
    if largest >= tokenizer.vocabulary_size or smallest < 0:
        yield (
            f"{shard.bin} has ids from {smallest} to {largest}; the vocabulary has "
            f"{tokenizer.vocabulary_size}"
        )
    as_special = sidecar["recipe"]["special_tokens_in_text"] == "as_special"
    in_text = sidecar["special_token_text"] if as_special else 0
    special = tokenizer.reference.tokenizer.id_to_token(end) in tokenizer.special_tokens
    if special and found - lengths.size > in_text:
        yield f"{shard.bin}: {found} ends of documents in {lengths.size} documents"


def wrong_ranks(shard: ShardFiles, sidecar: dict) -> Iterator[str]:
    """Yields what is wrong with the ranks."""
    if sidecar["rank"] is None:
        if shard.ranks.exists():
            yield f"{shard.ranks} is there, but the sidecar knows no ranks"
        return
    ranks = np.load(shard.ranks)
    actual = rank_range(ranks)
    if ranks.dtype != np.float64 or ranks.shape != (sidecar["documents"],):
        yield f"{shard.ranks}: {ranks.dtype} {ranks.shape} for {sidecar['documents']} documents"
    elif actual != sidecar["rank"]:
        yield f"{shard.ranks}: {actual}, its sidecar says {sidecar['rank']}"


def wrong_texts(
    shard: ShardFiles, sidecar: dict, ids: np.ndarray, lengths: np.ndarray, reference: Reference
) -> Iterator[str]:
    """Yields random documents that do not decode to what the Parquet file has."""
    path = reference.parquet / sidecar["source"]["file"]
    if sha256(path) != sidecar["source"]["sha256"]:
        yield f"{path} is not the file that {shard.prefix} was made from"
        return
    recipe = sidecar["recipe"]
    source = ParquetTexts(path, recipe["text_key"], recipe["invalid_utf8"] == "replace")
    count = min(reference.documents, lengths.size)
    chosen = np.random.default_rng(reference.seed).choice(lengths.size, count, replace=False)
    wanted, first = set(chosen.tolist()), 0
    ends = np.cumsum(lengths, dtype=np.int64)
    tokenizer = reference.tokenizer.reference.tokenizer
    normalised = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    for first_row, table in source.batches(1000):
        documents = source.documents(first_row, table)
        for number in sorted(wanted & set(range(first, first + len(documents.texts)))):
            tokens = ids[ends[number] - lengths[number] : ends[number] - 1].tolist()
            decoded = tokenizer.decode(tokens, skip_special_tokens=False)
            if normalised(decoded) != normalised(documents.texts[number - first]):
                row = documents.rows[number - first]
                yield f"{shard.prefix}: document {number} is not row {row} of {path}"
        first += len(documents.texts)
    if first != lengths.size:
        yield f"{path} has {first} documents, {shard.prefix} {lengths.size}"


def main(argv: list[str] | None = None) -> None:
    """Checks the shards of the command line."""
    parser = argparse.ArgumentParser(description="Reads converted shards again and checks them.")
    shards = parser.add_mutually_exclusive_group(required=True)
    shards.add_argument("--folder", type=Path, help="all shards of this folder")
    shards.add_argument("--shard", type=Path, nargs="+", help="paths without .bin and .idx")
    parser.add_argument("--tokenizer-model", type=Path, required=True, help="its folder")
    parser.add_argument("--parquet-dir", type=Path, help="compare with the files of this folder")
    parser.add_argument("--documents", type=int, default=20, help="decoded per shard (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which documents (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="shards at once (default: 2)")
    arguments = parser.parse_args(argv)
    prefixes = arguments.shard or sorted(
        {
            path.with_suffix("")
            for end in ("bin", "idx", "json")
            for path in arguments.folder.glob(f"*_document.{end}")
        }
    )
    if not prefixes:
        sys.exit(f"error: no shards in {arguments.folder}")
    try:
        reference = Reference(
            TokenizerFolder(arguments.tokenizer_model),
            arguments.parquet_dir,
            arguments.documents,
            arguments.seed,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    findings = []
    with ThreadPoolExecutor(arguments.threads) as pool:
        checks = pool.map(partial(check_shard, reference=reference), map(ShardFiles, prefixes))
        for found in tqdm(checks, "Checking", len(prefixes), unit=" shards", disable=None):
            findings += found
    if findings:
        sys.exit("\n".join(f"error: {finding}" for finding in findings))
    print(f"{len(prefixes)} shards are right")


if __name__ == "__main__":
    main()
