r"""Trains a small tokenizer of Qwen2's kind on Parquet text, for the smoke run.

Byte-level BPE with NFC and Qwen2's splitting pattern, its special tokens behind the ordinary ones,
saved as the four files of Qwen2's layout: merges.txt, vocab.json, tokenizer.json and
tokenizer_config.json. The same text gives the same files.

    python scripts/data/train_smoke_tokenizer.py --input data/parquet/phase1/part-00000.parquet \
        --vocab-size 4096 --output-dir data/tokenizer
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from scripts.common.files import replacing, write_json

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# How Qwen2 splits text before BPE: part of the format, from its tokenizer.json.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = 256  # the alphabet of byte-level BPE


def qwen2_tokenizer() -> Tokenizer:
    """Returns an untrained tokenizer with Qwen2's pipeline."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def train(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Trains a tokenizer of exactly `vocabulary_size` rows, special tokens included.

    Raises ValueError where the text is too little for that many tokens.
    """
    tokenizer = qwen2_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"the text gives a vocabulary of {tokenizer.get_vocab_size()} tokens, not "
            f"{vocabulary_size}: give more text or a smaller --vocab-size"
        )
    return tokenizer


def configuration(tokenizer: Tokenizer) -> dict:
    """Returns the content of tokenizer_config.json."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the four files; tokenizer.json, which the rest of the workflow reads, comes last."""
    content = json.loads(tokenizer.to_str())
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    with replacing(folder / "merges.txt") as partial:
        partial.write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    with replacing(folder / "vocab.json") as partial:
        partial.write_text(json.dumps(content["model"]["vocab"], ensure_ascii=False), "utf-8")
    write_json(folder / "tokenizer_config.json", configuration(tokenizer))
    with replacing(folder / "tokenizer.json") as partial:
        tokenizer.save(str(partial))


def texts(files: Iterable[Path], text_key: str) -> Iterator[str]:
    """Yields the documents of Parquet files."""
    for file in files:
        yield from filter(None, pq.read_table(file, columns=[text_key])[text_key].to_pylist())


def main(argv: list[str] | None = None) -> None:
    """Trains and saves a tokenizer."""
    parser = argparse.ArgumentParser(description="Trains a small tokenizer of Qwen2's kind.")
    parser.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE.parquet")
    parser.add_argument("--vocab-size", type=int, required=True, help="rows in all")
    parser.add_argument("--text-key", default="text", help="text column (default: text)")
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    smallest = BYTES + len(SPECIAL_TOKENS)
    if arguments.vocab_size < smallest:
        parser.error(f"--vocab-size must be at least {smallest}: all bytes and special tokens")
    try:
        tokenizer = train(texts(arguments.input, arguments.text_key), arguments.vocab_size)
    except ValueError as error:
        parser.error(str(error))
    save(tokenizer, arguments.output_dir)
    print(f"{arguments.output_dir}: a tokenizer of {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
