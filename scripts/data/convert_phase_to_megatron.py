r"""Converts Parquet text to Megatron's indexed data set: one `.bin`/`.idx` pair per Parquet file.

Documents are tokenized, an end-of-document token is appended to each, and beside the pair lie a
JSON file with what the shard holds and was made from, and, where the file has a `rank` column, the
ranks. There is no JSONL in between and no second pass; memory does not grow with the file.

    python scripts/data/convert_phase_to_megatron.py \
        --input data/parquet/phase1/part-00000.parquet --output-dir data/converted/megatron_phase1 \
        --output-prefix-prefix phase1 --tokenizer-model data/tokenizer

writes data/converted/megatron_phase1/phase1_part-00000_text_document.{bin,idx,json}. Several files
share the start of one process (about a second). Each shard appears as soon as it is whole; a file
that cannot be converted does not keep the others from it, and is named at the end. Shards that are
there already and up to date are kept: delete one to have it made again.
"""

import argparse
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from scripts.data.conversion import ENGINES, Settings, convert, finished, tokenization
from scripts.data.engines import TokenizerFolder
from scripts.data.shard_files import ShardFiles
from scripts.data.shards import conversion_recipe


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description="Converts Parquet text to Megatron's indexed data set, one pair per file."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, nargs="+", metavar="FILE.parquet")
    source.add_argument("--input-dir", type=Path, help="all *.parquet of this folder")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--output-prefix-prefix", required=True, help="for example phase1")
    parser.add_argument("--tokenizer-model", type=Path, required=True, help="its folder")
    parser.add_argument("--text-key", default="text", help="text column (default: text)")
    parser.add_argument(
        "--end-of-document",
        default="<|endoftext|>",
        help="token appended to each document, or its id (default: <|endoftext|>)",
    )
    parser.add_argument(
        "--special-tokens-in-text",
        choices=("as_text", "as_special"),
        default="as_text",
        help="whether text that looks like a special token becomes one (default: as_text)",
    )
    parser.add_argument(
        "--invalid-utf8",
        choices=("error", "replace"),
        default="error",
        help="what to do with bytes that are not UTF-8 (default: error)",
    )
    parser.add_argument(
        "--tokenizer-engine",
        choices=ENGINES,
        default="auto",
        help="auto: fastokens where it agrees with tokenizers, which is the reference",
    )
    parser.add_argument(
        "--workers-per-shard", type=positive, default=2, help="threads of a file (default: 2)"
    )
    parser.add_argument(
        "--num-shards", type=positive, default=1, help="files converted at once (default: 1)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=1000, help="most documents of a batch"
    )
    parser.add_argument("--megatron-dir", type=Path, help="not needed; accepted")
    parser.add_argument("--chunksize", type=int, help="not needed; accepted")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Parses a whole number above zero."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def shard_files(arguments: argparse.Namespace, path: Path) -> ShardFiles:
    """Returns the files that a Parquet file becomes."""
    name = f"{arguments.output_prefix_prefix}_{path.stem}_{arguments.text_key}_document"
    return ShardFiles(arguments.output_dir / name)


def convert_all(arguments: argparse.Namespace, inputs: list[Path]) -> list[str]:
    """Converts the files that are not converted yet and returns what went wrong."""
    tokenizer = TokenizerFolder(
        arguments.tokenizer_model,
        special_tokens_as_text=arguments.special_tokens_in_text == "as_text",
    )
    recipe = conversion_recipe(
        arguments.tokenizer_model,
        arguments.text_key,
        arguments.end_of_document,
        arguments.special_tokens_in_text,
        arguments.invalid_utf8,
    )
    shards = {path: shard_files(arguments, path) for path in inputs}
    if twice := [shard for shard, count in Counter(shards.values()).items() if count > 1]:
        raise ValueError(f"several files of that name would become {twice[0].bin}")
    pending = {path: shard for path, shard in shards.items() if not finished(path, shard, recipe)}
    if kept := len(shards) - len(pending):
        print(f"{kept} of {len(shards)} shards are there already and up to date")
    if not pending:
        return []
    how = tokenization(tokenizer, arguments.end_of_document, arguments.tokenizer_engine)
    settings = Settings(
        recipe, batch_rows=arguments.batch_size, threads=arguments.workers_per_shard
    )
    failures = []
    with (
        tqdm(total=sum(map(rows, pending)), unit=" rows", unit_scale=True, disable=None) as bar,
        ThreadPoolExecutor(arguments.num_shards * arguments.workers_per_shard) as tokenizers,
        ThreadPoolExecutor(arguments.num_shards) as converters,
    ):
        work = {
            shard: converters.submit(convert, path, shard, how, settings, tokenizers, bar.update)
            for path, shard in pending.items()
        }
        for shard, future in work.items():
            try:
                bar.write(summary(shard, future.result()))
            except (ValueError, OSError, RuntimeError) as error:
                failures.append(str(error))
    return failures


def rows(path: Path) -> int:
    """Returns how many rows a file says it has; 0 where it cannot be read (reported later)."""
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, ValueError):
        return 0


def summary(shard: ShardFiles, sidecar: dict) -> str:
    """Returns the lines that say what became of a file."""
    lines = [
        f"{shard.bin}: {sidecar['documents']:,} documents, {sidecar['tokens']:,} tokens, "
        f"end of document {sidecar['end_of_document_id']}, {sidecar['engine']}, "
        f"{sidecar['seconds']} s"
    ]
    if not sidecar["documents"]:
        lines.append(f"warning: {sidecar['source']['file']} holds no documents")
    if any(sidecar["skipped"].values()):
        lines.append(f"skipped: {sidecar['skipped']}")
    if sidecar["fell_back"]:
        lines.append(f"warning: tokenizers was used, since {sidecar['fell_back']}")
    if sidecar["rank"] and sidecar["rank"]["missing"]:
        lines.append(f"warning: {sidecar['rank']['missing']} documents have no rank")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Converts the files of the command line; exits with 1 where one could not be."""
    arguments = parse(argv)
    inputs = arguments.input or sorted(arguments.input_dir.glob("*.parquet"))
    if not inputs:
        sys.exit(f"error: no *.parquet in {arguments.input_dir}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once; the next run removes what is left over
    pa.set_memory_pool(pa.system_memory_pool())  # mimalloc is slow where another thread frees
    try:
        failures = convert_all(arguments, inputs)
    except (ValueError, OSError, RuntimeError) as error:
        failures = [str(error)]
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
