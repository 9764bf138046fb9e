"""Which points a model's profiling.yaml asks for, and how their files are called.

    python scripts/profiling/sweep.py --model qwen3_1p7b      lists them

A point's name spells its settings, so that a result's file says what it is, as in
layers=fast,micro_batch_size=8.json.
"""

import argparse
import json
from itertools import product
from typing import Any

from scripts.common.settings import PARAMETERS, check, read_yaml


def load_profiling(model: str) -> dict[str, Any]:
    """Reads and checks scripts/params/<model>/profiling.yaml."""
    name = f"scripts/params/{model}/profiling.yaml"
    settings = read_yaml(PARAMETERS / model / "profiling.yaml")
    return check(settings, PARAMETERS / "profiling.schema.yaml", name)


def points(profiling: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the settings of every point by its name, in the order of the file, each once."""
    result = {}
    for sweep in profiling["sweeps"]:
        for values in product(*sweep.values()):
            settings = dict(zip(sweep, values, strict=True))
            result[point_name(settings)] = settings
    return result


def point_name(settings: dict[str, Any]) -> str:
    """Spells settings as a file name."""
    return ",".join(f"{name}={json.dumps(value).strip('"')}" for name, value in settings.items())


def main(argv: list[str] | None = None) -> None:
    """Lists the points."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder of scripts/params")
    print(*points(load_profiling(parser.parse_args(argv).model)), sep="\n")


if __name__ == "__main__":
    main()
