"""The tokenizer's files: which they are, and which token ends a document."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from scripts.common.files import read_json

REQUIRED_FILES = ("tokenizer.json", "tokenizer_config.json")
OPTIONAL_FILES = ("merges.txt", "vocab.json", "special_tokens_map.json", "added_tokens.json")


class TokenizerError(ValueError):
    """A tokenizer folder cannot be used; the message says why."""


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies the tokenizer's files, byte for byte."""
    check_files(source)
    for name in (*REQUIRED_FILES, *OPTIONAL_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def end_of_document_id(folder: Path, token: str | None, vocab_size: int) -> int:
    """Returns the id of the token that ends a document.

    Args:
        folder: the tokenizer's.
        token: the token's text; None takes eos_token of tokenizer_config.json.
        vocab_size: rows of the model's embedding, which must cover the tokenizer.

    Raises:
        TokenizerError: a file or the token is missing, or the model is too small for the tokenizer.
    """
    check_files(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise TokenizerError(f"{folder} has {size} tokens, the model only {vocab_size} rows")
    if token is None:
        eos = read_json(folder / "tokenizer_config.json").get("eos_token")
        token = eos["content"] if isinstance(eos, dict) else eos
    if token is None:
        raise TokenizerError(
            f"{folder}/tokenizer_config.json names no eos_token; give --end-of-document"
        )
    identifier = tokenizer.token_to_id(token)
    if identifier is None:
        raise TokenizerError(f"{folder} has no token {token!r}")
    return identifier


def check_files(folder: Path) -> None:
    """Refuses a folder that lacks one of the tokenizer's files."""
    for name in REQUIRED_FILES:
        if not (folder / name).is_file():
            raise TokenizerError(f"{folder} is no tokenizer: {name} is missing")
