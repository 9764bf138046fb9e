"""Says in a few lines what a run has made and where to look.

python scripts/report/summary.py --artifacts artifacts --converted data/converted --train-name NAME
"""

import argparse
from pathlib import Path

import pandas as pd

from scripts.common.files import read_json


def summary(artifacts: Path, converted: Path, train_name: str) -> list[str]:
    """Returns the lines of the summary; raises SystemExit if the run is not complete."""
    markers = sorted((artifacts / "run_state" / train_name).glob("phase*.json"))
    verdict_file = artifacts / "hf" / f"{train_name}.verified.json"
    if not markers or not verdict_file.exists():
        raise SystemExit(f"{artifacts} holds no complete run named {train_name}")
    phases = [read_json(marker) for marker in markers]
    last, tokens = phases[-1], sum(phase["tokens"] for phase in phases)
    verdict = read_json(verdict_file)
    shards = pd.concat(
        pd.read_parquet(path) for path in converted.glob("megatron_phase*.manifest.parquet")
    )
    example = read_json(artifacts / "report" / "generations.json")["continuations"][0]
    return [
        f"shards       {len(shards)}, {shards['tokens'].sum():,} tokens  -> {converted}",
        f"training     {len(markers)} phases, {last['last_iteration']} iterations, "
        f"{tokens:,} tokens  -> {last['checkpoint']}",
        f"model        {verdict['parameters']:,} parameters, equal to Megatron's logits within "
        f"{verdict['max_abs_error']:.1e}  -> {artifacts / 'hf' / train_name}",
        f"sample       {example['prompt']!r} -> {example['continuation']!r}",
    ]


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--converted", type=Path, required=True)
    parser.add_argument("--train-name", required=True)
    parser.add_argument("--report", type=Path, help="the report's page, to be named too")
    arguments = parser.parse_args(argv)
    lines = summary(arguments.artifacts, arguments.converted, arguments.train_name)
    if arguments.report:
        lines.append(f"report       open {arguments.report} in a browser")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
