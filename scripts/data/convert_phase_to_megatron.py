r"""Converts Parquet text to Megatron's indexed data set: one `.bin`/`.idx` pair per Parquet file.

Documents are tokenized, an end-of-document token is appended to each, and beside the pair lie a
JSON file with what the shard holds and was made from, and, where the file has a `rank` column, the
ranks. There is no JSONL in between and no second pass; memory does not grow with the file.

    python scripts/data/convert_phase_to_megatron.py \
        --input data/parquet/phase1/part-00000.parquet --output-dir data/converted/megatron_phase1 \
        --output-prefix-prefix phase1 --tokenizer-model data/tokenizer

writes data/converted/megatron_phase1/phase1_part-00000_text_document.{bin,idx,json}.
"""

import argparse
import sys
from pathlib import Path

from scripts.data.conversion import Settings, convert
from scripts.data.engines import ENGINES, TokenizerFolder
from scripts.data.shard_files import ShardFiles
from scripts.data.shards import conversion_recipe


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description="Converts Parquet text to Megatron's indexed data set, one pair per file."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, nargs="+", metavar="FILE.parquet")
    source.add_argument("--input-dir", type=Path, help="converts all *.parquet of this folder")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument(
        "--tokenizer-model", type=Path, required=True, help="the tokenizer's folder"
    )
    parser.add_argument("--text-key", default="text", help="text column (default: text)")
    parser.add_argument("--output-prefix-prefix", required=True, help="for example phase1")
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
    parser.add_argument("--invalid-utf8", choices=("error", "replace"), default="error")
    parser.add_argument("--tokenizer-engine", choices=ENGINES, default="auto")
    parser.add_argument("--num-shards", type=int, help="only the first N files")
    parser.add_argument("--workers-per-shard", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--batch-size", type=int, default=1000, help="most rows of a batch")
    parser.add_argument("--chunksize", type=int, help="accepted and not needed")
    parser.add_argument("--megatron-dir", type=Path, help="accepted and not needed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Converts the files of the command line."""
    arguments = parse(argv)
    inputs = arguments.input or sorted(arguments.input_dir.glob("*.parquet"))
    try:
        tokenizer = TokenizerFolder(
            arguments.tokenizer_model, arguments.special_tokens_in_text == "as_text"
        )
        settings = Settings(
            text_key=arguments.text_key,
            end_of_document_id=tokenizer.end_of_document_id(arguments.end_of_document),
            replace_invalid_utf8=arguments.invalid_utf8 == "replace",
            batch_rows=arguments.batch_size,
            threads=arguments.workers_per_shard,
        )
        recipe = conversion_recipe(
            arguments.tokenizer_model,
            arguments.text_key,
            arguments.end_of_document,
            arguments.special_tokens_in_text,
            arguments.invalid_utf8,
        )
        for path in inputs[: arguments.num_shards]:
            name = f"{arguments.output_prefix_prefix}_{path.stem}_{arguments.text_key}_document"
            shard = ShardFiles(arguments.output_dir / name)
            sidecar = convert(path, shard, tokenizer, settings, recipe)
            print(
                f"{shard.bin}: {sidecar['documents']} documents, {sidecar['tokens']} tokens, "
                f"{sidecar['seconds']} s"
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
