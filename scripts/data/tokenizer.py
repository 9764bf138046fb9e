"""Fetches a tokenizer's four files and checks that they belong together and fit the model.

    python scripts/data/tokenizer.py fetch --tokenizer data/tokenizer \\
        --repository thu-pacman/PCMind-2.1-Kaiyuan-2B --revision refs/pr/1
    python scripts/data/tokenizer.py check --tokenizer data/tokenizer \\
        --model scripts/params/qwen3_1p7b/model.yaml --end-of-document '<|endoftext|>'

The check refuses a tokenizer whose ids do not fit the model's embedding, that lacks the token which
ends documents, or whose files contradict each other: tools differ in which of them they read, and
would differ in the ids without an error.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from scripts.common.files import sha256, write_json
from scripts.data.engines import TokenizerFolder
from scripts.data.hub import HubError, Repository

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def main(argv: list[str] | None = None) -> None:
    """Fetches or checks a tokenizer; exits with 1 and a sentence if it does not fit."""
    arguments = parse(argv)
    try:
        if arguments.command == "fetch":
            fetch(arguments.repository, arguments.revision, arguments.tokenizer)
            return
        facts = check(arguments.tokenizer, arguments.model, arguments.end_of_document)
        print(summary(facts))
        if arguments.output:
            write_json(arguments.output, facts)
    except (HubError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download the four files from the hub")
    fetching.add_argument("--repository", required=True, help="model repository on the hub")
    fetching.add_argument("--revision", default="main", help="branch, tag, refs/pr/N or commit")
    checking = commands.add_parser("check", help="check the files against the model")
    checking.add_argument("--model", type=Path, required=True, help="the model's model.yaml")
    checking.add_argument("--end-of-document", required=True, metavar="TOKEN")
    checking.add_argument("--output", type=Path, help="JSON file for what was found")
    for command in (fetching, checking):
        command.add_argument("--tokenizer", type=Path, required=True, help="folder of the files")
    return parser.parse_args(argv)


def fetch(name: str, revision: str, folder: Path) -> None:
    """Downloads the four files at the commit that the revision means now."""
    commit = Repository(name, "model", revision).commit()
    repository = Repository(name, "model", commit)
    files = repository.files()
    if missing := [file for file in FILES if file not in files]:
        raise HubError(f"{name} has no {', '.join(missing)} at revision {revision} ({commit[:12]})")
    for file in FILES:
        repository.download(files[file], folder / file)
    print(f"{folder}: {', '.join(FILES)} of {name}, {revision} ({commit})")


def check(folder: Path, model: Path, end_of_document: str) -> dict[str, Any]:
    """Returns the facts of a tokenizer; raises ValueError if its files or the model contradict."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    tokenizer = TokenizerFolder(folder, special_tokens_as_text=True)
    definition = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    check_consistency(folder, definition, config)
    rows = yaml.safe_load(model.read_text(encoding="utf-8"))["padded_vocab_size"]
    if tokenizer.vocabulary_size > rows:
        raise ValueError(
            f"{folder}: ids go up to {tokenizer.vocabulary_size - 1:,}, but {model} has "
            f"{rows:,} rows (padded_vocab_size): this is another model's tokenizer"
        )
    return {
        "files": {name: _identity(folder / name) for name in FILES},
        "ordinary_tokens": len(definition["model"]["vocab"]),
        "added_tokens": {token["content"]: token["id"] for token in definition["added_tokens"]},
        "vocabulary_size": tokenizer.vocabulary_size,
        "model_rows": rows,
        "end_of_document": end_of_document,
        "end_of_document_id": tokenizer.token_id(end_of_document),
        "eos_token": _text(config.get("eos_token")),
    }


def check_consistency(folder: Path, definition: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises ValueError if the four files do not describe the same tokenizer."""
    if definition["model"]["type"] != "BPE":
        raise ValueError(f"{folder}/tokenizer.json: {definition['model']['type']} and not BPE")
    if _read_json(folder / "vocab.json") != definition["model"]["vocab"]:
        raise ValueError(f"{folder}: vocab.json has another vocabulary than tokenizer.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    if merges != [_merge(merge) for merge in definition["model"]["merges"]]:
        raise ValueError(f"{folder}: merges.txt has other merges than tokenizer.json")
    added = {str(token["id"]): token["content"] for token in definition["added_tokens"]}
    for number, token in config.get("added_tokens_decoder", {}).items():
        if added.get(number) != token["content"]:
            raise ValueError(
                f"{folder}: id {number} is {token['content']!r} in tokenizer_config.json and "
                f"{added.get(number)!r} in tokenizer.json"
            )


def summary(facts: dict[str, Any]) -> str:
    """Says in one line what the tokenizer is."""
    line = (
        f"tokenizer: {facts['ordinary_tokens']:,} tokens and {len(facts['added_tokens'])} added "
        f"ones in {facts['model_rows']:,} rows; documents end with {facts['end_of_document']} "
        f"({facts['end_of_document_id']})"
    )
    if facts["eos_token"] not in (None, facts["end_of_document"]):
        line += f", the tokenizer's own eos_token is {facts['eos_token']}"
    return f"{line}; sha256 {facts['files']['tokenizer.json']['sha256'][:12]}"


def _identity(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _merge(merge: str | list[str]) -> str:
    """Older files hold a merge as "a b", newer ones as ["a", "b"]."""
    return merge if isinstance(merge, str) else " ".join(merge)


def _text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


if __name__ == "__main__":
    main()
