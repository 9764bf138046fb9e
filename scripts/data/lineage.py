"""Which documents a run has seen, and when: from the phases' indices alone, no run is repeated.

    python scripts/data/lineage.py --phase 3 --step 120            # the documents of that step
    python scripts/data/lineage.py --phase 3 --step 120 --decode   # their text: the exact batch
    python scripts/data/lineage.py --phase 3 --step 120 --up-to    # all that was consumed up to it
    python scripts/data/lineage.py --checkpoint artifacts/checkpoints/kaiyuan2b/iter_0000400

A step is an iteration, counted from the phase's first one, which is 1. Paths, the global batch and
the tokenizer come from config.yaml and the model's parameters; a checkpoint names its own batch
and phases. A document is named by its shard and its number there, from 0 on; rows without text have
none.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scripts.common.files import sha256
from scripts.common.settings import load_parameters, read_yaml
from scripts.data.phase_reader import PhaseIndex, read_index

CHUNK = 1_000_000  # samples or documents that are looked at in one go
INDEX = "megatron_phase{phase}.index.json"


def documents_of(index: PhaseIndex, first: int, last: int) -> pd.DataFrame:
    """Returns the documents of the training samples first … last - 1, counted in training order.

    One row for each stretch of a document that a sample's inputs hold: `sample`, `shard`,
    `document` (number within the shard), `place` (in training order), `number` (within the phase),
    `offset` (first token), `tokens`, and `rank` where the phase is ordered by it.
    """
    samples, order, rows = index.samples("train"), index.sample_order("train"), []
    documents, lengths = (index.of_documents(name, "train") for name in ("documents", "lengths"))
    for sample in range(first, last):
        stored = order[sample]
        (place, offset), (end, end_offset) = samples[stored : stored + 2].tolist()
        while place < end or (place == end and offset < end_offset):
            stop = end_offset if place == end else int(lengths[place])
            rows.append((sample, place, int(documents[place]), offset, stop - offset))
            place, offset = place + 1, 0
    table = pd.DataFrame(rows, columns=["sample", "place", "number", "offset", "tokens"])
    starts = index.manifest.first_documents
    shard = np.searchsorted(starts, table.number, side="right") - 1
    table.insert(1, "shard", np.array(index.manifest.shards, dtype=object)[shard])
    table.insert(2, "document", table.number - starts[shard])
    if (ranks := index.ranks("train")) is not None:
        table["rank"] = ranks[table.place]
    return table


def consumed(index: PhaseIndex, samples: int) -> dict[str, Any]:
    """Returns what the first `samples` training samples of a phase hold.

    Keys: samples, tokens, documents and shards (of which at least one token was an input), and
    `rank` {min, max} where the phase is ordered by rank, else None. Takes one byte a document.
    """
    documents = documents_per_shard(index, samples)
    rank, ranks = None, index.ranks("train")
    if ranks is not None and samples:
        rank = {"min": float(ranks[0]), "max": float(ranks[int(documents.sum()) - 1])}
    return {
        "samples": samples,
        "tokens": samples * index.facts["sequence_length"],
        "documents": int(documents.sum()),
        "shards": int((documents > 0).sum()),
        "rank": rank,
    }


def documents_per_shard(index: PhaseIndex, samples: int) -> np.ndarray:
    """Returns how many documents of each shard the first `samples` samples hold: int64 [shards]."""
    documents = index.of_documents("documents", "train")
    seen = np.zeros(index.manifest.documents, dtype=bool)
    for places in places_of(index, samples):
        seen[documents[places]] = True
    shards = pairwise(index.manifest.first_documents.tolist())
    return np.array([np.count_nonzero(seen[first:last]) for first, last in shards])


def places_of(index: PhaseIndex, samples: int) -> Iterator[np.ndarray | slice]:
    """Yields, in chunks, the places in training order of the documents of the first samples."""
    starts, order = index.samples("train"), index.sample_order("train")
    if isinstance(order, range):
        end = last_places(starts[samples : samples + 1])[0] + 1 if samples else 0
        yield from (slice(first, min(first + CHUNK, end)) for first in range(0, end, CHUNK))
        return
    taken = np.zeros(len(starts) - 1, dtype=bool)
    taken[order[:samples]] = True
    for first in range(0, len(taken), CHUNK):
        chunk, of_chunk = starts[first : first + CHUNK + 1], taken[first : first + CHUNK]
        begins, ends = chunk[:-1, 0], last_places(chunk[1:])
        base, width = begins[0], ends[-1] - begins[0] + 2
        opened = np.bincount(begins[of_chunk] - base, minlength=width)
        closed = np.bincount(ends[of_chunk] + 1 - base, minlength=width)
        yield base + np.flatnonzero(np.cumsum(opened - closed))


def last_places(ends: np.ndarray) -> np.ndarray:
    """Returns the last place of samples that end before (place, token), [samples, 2]."""
    return ends[:, 0] - (ends[:, 1] == 0)


def text_of(index: PhaseIndex, table: pd.DataFrame, tokenizer_folder: Path) -> Iterator[str]:
    """Yields the text of each row of `documents_of`.

    Raises:
        ValueError: the tokenizer is not the one that the shards were made with.
    """
    from tokenizers import Tokenizer

    from scripts.data.phase_dataset import OrderedDocuments

    definition = tokenizer_folder / "tokenizer.json"
    if sha256(definition) != index.manifest.common["recipe"]["tokenizer_sha256"]:
        raise ValueError(f"{definition} is not the tokenizer that these shards were made with")
    tokenizer, tokens = Tokenizer.from_file(str(definition)), OrderedDocuments(index, "train")
    for row in table.itertuples():
        ids = tokens.get(row.place, row.offset, row.tokens)
        yield tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def checkpoint_phases(checkpoint: Path) -> tuple[list[tuple[int, int]], int]:
    """Returns [(phase, its iterations up to the checkpoint)] and the global batch, as it says.

    Raises:
        ValueError: the folder is not a checkpoint of this project.
    """
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    match = re.fullmatch(r"iter_(\d{7})", checkpoint.name)
    if not match or not (checkpoint / "metadata.json").is_file():
        raise ValueError(f"{checkpoint} is not the folder of a checkpoint, such as iter_0000400")
    args = load_common_state_dict(str(checkpoint))["args"]
    iteration = int(match[1])
    ends = [end for end in args.phase_transition_iterations or [] if end < iteration]
    borders = [0, *ends, iteration]
    steps = [(phase, end - borders[phase - 1]) for phase, end in enumerate(borders) if phase]
    return steps, args.global_batch_size


def show_step(args: argparse.Namespace, index: PhaseIndex, batch: int) -> None:
    """Prints the documents of a step, and their text if that is asked for."""
    table = documents_of(index, (args.step - 1) * batch, args.step * batch)
    if args.decode:
        table["text"] = list(text_of(index, table, args.tokenizer))
    if args.json:
        print(table.to_json(orient="records", lines=True, force_ascii=False), end="")
    elif args.decode:
        for row in table.itertuples():
            print(
                f"--- sample {row.sample}: {row.shard} document {row.document}, "
                f"tokens {row.offset} to {row.offset + row.tokens - 1}\n{row.text}"
            )
    else:
        print(table.drop(columns=["place", "number"]).to_string(index=False))


def show_consumed(args: argparse.Namespace, phase: int, index: PhaseIndex, samples: int) -> None:
    """Prints what a phase's first samples hold."""
    summary = {"phase": phase, **consumed(index, samples)}
    if args.json:
        counts = zip(index.manifest.shards, documents_per_shard(index, samples), strict=True)
        summary["documents_per_shard"] = {shard: int(count) for shard, count in counts if count}
        print(json.dumps(summary))
        return
    rank = summary["rank"]
    print(
        f"phase {phase}: {samples:,} samples, {summary['tokens']:,} tokens, "
        f"{summary['documents']:,} of {index.facts['train']['documents']:,} training documents, "
        f"{summary['shards']:,} of {len(index.manifest):,} shards"
        + (f", rank {rank['min']:g} to {rank['max']:g}" if rank else "")
    )


def open_phase(args: argparse.Namespace, phase: int, samples: int) -> PhaseIndex:
    """Opens the index of a phase, which has to have so many samples."""
    index = read_index(args.index or args.converted_dir / INDEX.format(phase=phase))
    if samples > index.training_samples:
        raise ValueError(
            f"phase {phase} has {index.training_samples} training samples, "
            f"that step needs {samples}"
        )
    return index


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; what is not given comes from config.yaml."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", type=int)
    parser.add_argument("--step", type=int, help="iteration, counted from the phase's first one, 1")
    parser.add_argument("--up-to", action="store_true", help="all that was consumed up to the step")
    parser.add_argument("--checkpoint", type=Path, help="all that a checkpoint has consumed")
    parser.add_argument("--decode", action="store_true", help="show the text of the step")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--index", type=Path, help="default: the phase's in paths.converted")
    parser.add_argument("--converted-dir", type=Path, help="default: paths.converted")
    parser.add_argument("--tokenizer", type=Path, help="default: paths.tokenizer")
    parser.add_argument("--global-batch-size", type=int, help="default: the model's")
    args = parser.parse_args(argv)
    if args.checkpoint is None and (not args.phase or not args.step or args.step < 1):
        parser.error("name a phase and a step (from 1 on), or a checkpoint")
    if not (args.converted_dir and args.tokenizer and args.global_batch_size):
        config = read_yaml(args.config)
        args.converted_dir = args.converted_dir or Path(config["paths"]["converted"])
        args.tokenizer = args.tokenizer or Path(config["paths"]["tokenizer"])
        hparams = load_parameters(config["model"])["hparams"]
        args.global_batch_size = args.global_batch_size or hparams["global_batch_size"]
    return args


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parse_arguments(argv)
    try:
        if args.checkpoint:
            steps, batch = checkpoint_phases(args.checkpoint)
            for phase, iterations in steps:
                samples = iterations * batch
                show_consumed(args, phase, open_phase(args, phase, samples), samples)
            return
        samples = args.step * args.global_batch_size
        index = open_phase(args, args.phase, samples)
        if args.up_to:
            show_consumed(args, args.phase, index, samples)
        else:
            show_step(args, index, args.global_batch_size)
    except (OSError, ValueError) as error:
        sys.exit(f"lineage: {error}")


if __name__ == "__main__":
    main()
