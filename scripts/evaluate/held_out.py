"""Loss and bits per byte on held-out text: of each phase, and of any other texts by source.

    python scripts/evaluate/held_out.py --export MODEL_DIR \\
        --index data/converted/megatron_phase{1,2,3,4,5}.index.json \\
        --texts held_out.parquet --output held_out.json
    python scripts/evaluate/held_out.py --checkpoint RUN/iter_0000100 --model model.yaml …

A phase's held-out documents are those that its index keeps out of training. --texts is a Parquet
file with a column `text` and, if there are several sources, a column `source`.

Each document is scored by itself, after an end-of-document token, as training began it; a document
longer than the context is cut into windows that follow each other. The loss is in nats a token, the
end of the document counted. Bits per byte is the same total over the bytes of the text, a number
that does not depend on the tokenizer. The model is an export (on a GPU if there is one), or a
checkpoint through Megatron itself on the CPU.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from scripts.common.files import write_json
from scripts.data.phase_dataset import OrderedDocuments
from scripts.data.phase_reader import read_index
from scripts.release import megatron_model
from scripts.release.architecture import Architecture
from scripts.release.arguments import (
    add_checkpoint_or_export,
    parse_checkpoint_or_export,
    parser_of,
)
from scripts.release.checkpoint import Checkpoint
from scripts.release.export import read_export
from scripts.release.hf_model import Logits, hf_logits, load_model
from scripts.release.tokenizer import end_of_document_id
from scripts.release.verify_export import megatron_logits

IGNORED = -100  # a label that is not scored


@dataclass(frozen=True)
class Model:
    """What scores documents.

    Attributes:
        logits: tokens int64 [batch, length] → logits [batch, length, vocabulary].
        context: tokens that it can see.
        end_of_document: the token that ends a document.
        tokenizer: of the model.
    """

    logits: Logits
    context: int
    end_of_document: int
    tokenizer: Tokenizer


@dataclass
class Score:
    """Sums over documents."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    def result(self, name: str) -> dict[str, Any]:
        """Returns what is reported of a group of documents."""
        return {
            "name": name,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.nats / self.tokens,
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
        }


class HeldOutError(ValueError):
    """There is nothing to score; the message says why."""


def phase_documents(index_file: Path, limit: int) -> Iterator[np.ndarray]:
    """Yields the tokens of a phase's held-out documents, at most `limit`, evenly spread."""
    documents = OrderedDocuments(read_index(index_file), "valid")
    for place in spread(np.arange(len(documents)), limit):
        yield documents.get(int(place)).astype(np.int64)


def spread(items: np.ndarray, limit: int) -> np.ndarray:
    """Takes at most `limit` items at even distances."""
    if len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).astype(np.int64)]


def text_documents(file: Path, model: Model, limit: int) -> dict[str, list[np.ndarray]]:
    """Reads and tokenizes texts, by source; each ends with the end-of-document token."""
    table = pq.read_table(file)
    if "text" not in table.column_names:
        raise HeldOutError(f"{file} has no column `text`, only {', '.join(table.column_names)}")
    texts = np.array(table["text"].to_pylist(), dtype=object)
    has_source = "source" in table.column_names
    sources = np.array(table["source"].to_pylist() if has_source else [file.stem] * len(texts))
    documents = {}
    for source in sorted(set(sources)):
        chosen = spread(np.array([text for text in texts[sources == source] if text]), limit)
        encoded = model.tokenizer.encode_batch(list(chosen), add_special_tokens=False)
        documents[source] = [np.array([*text.ids, model.end_of_document]) for text in encoded]
    return documents


def score(model: Model, documents: Iterable[np.ndarray], batch_size: int) -> Score:
    """Scores documents.

    Args:
        model: what scores them.
        documents: tokens int64 of each, the end-of-document token included.
        batch_size: windows at a time.
    """
    total = Score()
    token_bytes = byte_lengths(model.tokenizer)
    windows = (window for document in documents for window in counted(model, document, total))
    for batch in batched(windows, batch_size):
        longest = max(len(window) for window in batch)
        tokens = torch.full((len(batch), longest - 1), model.end_of_document)
        labels = torch.full((len(batch), longest - 1), IGNORED)
        for row, window in enumerate(batch):
            tokens[row, : len(window) - 1] = torch.from_numpy(window[:-1])
            labels[row, : len(window) - 1] = torch.from_numpy(window[1:])
            total.bytes += int(token_bytes[window[1:]].sum())
        logits = model.logits(tokens).float().flatten(0, 1)
        nats = torch.nn.functional.cross_entropy(
            logits, labels.flatten().to(logits.device), ignore_index=IGNORED, reduction="sum"
        )
        total.nats += nats.item()
        total.tokens += int((labels != IGNORED).sum())
    return total


def counted(model: Model, document: np.ndarray, total: Score) -> Iterator[np.ndarray]:
    """Yields the windows of a document, and counts it.

    Each window has `context` labels; its first token is the last one of the window before.
    """
    total.documents += 1
    tokens = np.concatenate([[model.end_of_document], document])
    for start in range(0, len(document), model.context):
        yield tokens[start : start + model.context + 1]


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Returns how many bytes of text each token of a byte-level BPE stands for: int64 [tokens].

    In its vocabulary each byte is one character. Special tokens stand for no text.
    """
    added = tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token, identifier in tokenizer.get_vocab(with_added_tokens=True).items():
        if identifier not in added:
            lengths[identifier] = len(token)
        elif not added[identifier].special:
            lengths[identifier] = len(token.encode())
    return lengths


def load_export(folder: Path) -> Model:
    """Loads an exported model onto the GPU if there is one."""
    provenance = read_export(folder)
    model = load_model(folder)
    return Model(
        hf_logits(model),
        model.config.max_position_embeddings,
        provenance["end_of_document_id"],
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )


def load_checkpoint(checkpoint: Path, model_file: Path, tokenizer: Path, end: str | None) -> Model:
    """Loads a checkpoint into Megatron's model; to be called within `one_process`."""
    architecture = Architecture.read(model_file)
    model = megatron_model.build(architecture)
    megatron_model.load(model, Checkpoint(checkpoint).folder)
    return Model(
        megatron_logits(model),
        architecture.max_position_embeddings,
        end_of_document_id(tokenizer, end, architecture.vocab_size),
        Tokenizer.from_file(str(tokenizer / "tokenizer.json")),
    )


def evaluate(
    model: Model, indexes: list[Path], texts: list[Path], limit: int, batch_size: int
) -> list[dict[str, Any]]:
    """Scores each phase and each source of the texts; `limit` documents of each at most."""
    groups: dict[str, Iterable[np.ndarray]] = {
        f"phase{read_index(index).facts['phase']}": phase_documents(index, limit)
        for index in indexes
    }
    for file in texts:
        groups |= text_documents(file, model, limit)
    results = []
    for name, documents in groups.items():
        bar = tqdm(documents, desc=name, unit="document", disable=None)
        total = score(model, bar, batch_size)
        if total.tokens == 0:
            raise HeldOutError(f"{name} has no held-out documents: raise validation_fraction")
        results.append(total.result(name))
    return results


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    add_checkpoint_or_export(parser)
    parser.add_argument("--index", type=Path, nargs="*", default=[], help="phase indexes")
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="Parquet files")
    parser.add_argument(
        "--max-documents", type=int, default=2000, help="of a phase or source (default: 2000)"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="windows (default: 4)")
    parser.add_argument("--output", type=Path, required=True, help="results, JSON")
    arguments = parse_checkpoint_or_export(parser, argv)
    if not arguments.index and not arguments.texts:
        parser.error("give --index or --texts: there is nothing to evaluate on")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    arguments = parse_arguments(argv)
    with ExitStack() as stack:
        try:
            if arguments.export:
                model = load_export(arguments.export)
            else:
                stack.enter_context(megatron_model.one_process())
                model = load_checkpoint(
                    arguments.checkpoint,
                    arguments.model,
                    arguments.tokenizer,
                    arguments.end_of_document,
                )
            groups = evaluate(
                model,
                arguments.index,
                arguments.texts,
                arguments.max_documents,
                arguments.batch_size,
            )
        except (ValueError, OSError) as error:
            sys.exit(f"held_out: {error}")
    write_json(arguments.output, {"context": model.context, "groups": groups})
    for group in groups:
        print(
            f"{group['name']:>12}  loss {group['loss']:.4f}  "
            f"bits per byte {group['bits_per_byte']:.4f}  {group['tokens']:,} tokens"
        )


if __name__ == "__main__":
    main()
