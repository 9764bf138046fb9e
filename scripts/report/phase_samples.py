"""Continues the same prompts with the model as it was at the end of each phase.

    python scripts/report/phase_samples.py --marker artifacts/run_state/RUN/phase{1,2,3,4}.json \\
        --model scripts/params/qwen3_1p7b/model.yaml --tokenizer data/tokenizer --output FILE.json

Each checkpoint is exported into a temporary folder beside the output, one after the other, so that
one export's room is needed. A phase whose checkpoint is gone is left out.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.common.files import write_json
from scripts.release.architecture import Architecture, ArchitectureError
from scripts.release.checkpoint import Checkpoint, CheckpointError
from scripts.release.export import export
from scripts.release.generate import PROMPTS, generate, read_prompts
from scripts.release.tokenizer import TokenizerError


def phase_samples(
    markers: list[Path], architecture: Architecture, tokenizer: Path, folder: Path
) -> list[dict[str, Any]]:
    """Returns for each phase whose checkpoint is there: iteration and continuations."""
    prompts, samples = read_prompts(PROMPTS), []
    for marker in markers:
        try:
            checkpoint = Checkpoint(marker)
        except CheckpointError as error:
            print(f"{marker}: left out, {error}")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as room:
            model = Path(room) / "model"
            export(checkpoint, architecture, tokenizer, model)
            continuations = generate(model, prompts, max_new_tokens=64)
        samples.append({"iteration": checkpoint.iteration, "continuations": continuations})
    return samples


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--marker", type=Path, nargs="*", required=True, help="of the phases")
    parser.add_argument("--model", type=Path, required=True, help="scripts/params/M/model.yaml")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="continuations, JSON")
    arguments = parser.parse_args(argv)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        samples = phase_samples(
            arguments.marker,
            Architecture.read(arguments.model),
            arguments.tokenizer,
            arguments.output.parent,
        )
    except (ArchitectureError, CheckpointError, TokenizerError) as error:
        sys.exit(f"phase_samples: {error}")
    write_json(arguments.output, samples)


if __name__ == "__main__":
    main()
