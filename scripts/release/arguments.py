"""Arguments that several scripts of this stage share: which model, as a checkpoint or an export."""

import argparse
from pathlib import Path

CHECKPOINT = "folder iter_XXXXXXX, a run's folder (its latest checkpoint) or a phase's marker"
MODEL = "scripts/params/M/model.yaml"
TOKENIZER = "folder of the tokenizer"
EXPORT = "folder made by export.py"


def parser_of(description: str) -> argparse.ArgumentParser:
    """Returns a parser whose help is the script's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds what names a trained model: --checkpoint, --model and --tokenizer."""
    parser.add_argument("--checkpoint", type=Path, required=True, help=CHECKPOINT)
    parser.add_argument("--model", type=Path, required=True, help=MODEL)
    parser.add_argument("--tokenizer", type=Path, required=True, help=TOKENIZER)


def add_checkpoint_or_export(parser: argparse.ArgumentParser) -> None:
    """Adds --export and, instead of it, --checkpoint with what it needs."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--export", type=Path, help=EXPORT)
    what.add_argument("--checkpoint", type=Path, help=CHECKPOINT)
    for name, meaning in (("--model", MODEL), ("--tokenizer", TOKENIZER)):
        parser.add_argument(name, type=Path, help=f"{meaning}; with --checkpoint")
    parser.add_argument("--end-of-document", metavar="TOKEN", help="with --checkpoint")


def parse_checkpoint_or_export(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> argparse.Namespace:
    """Parses a command line; a checkpoint without its model or tokenizer is refused."""
    arguments = parser.parse_args(argv)
    if arguments.checkpoint and not (arguments.model and arguments.tokenizer):
        parser.error("--checkpoint needs --model and --tokenizer")
    return arguments
