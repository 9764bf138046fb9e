"""Averages the weights of the last checkpoints of a run, in place of a learning rate decay.

    python scripts/release/average.py --run artifacts/checkpoints/kaiyuan2b --last 8 --every 400 \\
        --output artifacts/checkpoints/kaiyuan2b_average
    python scripts/release/average.py --checkpoints RUN/iter_0000300 RUN/iter_0000400 --output …

Kaiyuan-2B's final model is the plain average of its last 8 checkpoints, 400 steps apart (method:
arXiv 2511.18903). Sums are in fp32, and so is the result, whatever the type of the checkpoints.
Tensors are streamed: memory holds one model in fp32 and one tensor of a checkpoint (12 GB for
qwen3_1p7b), however many checkpoints there are.

--output is a folder like a run's: iter_XXXXXXX of the last iteration and a tracker. It evaluates
and exports like any other; it has no optimiser's state (a run begins with it by Megatron's
--pretrained-checkpoint).
"""

import sys
from pathlib import Path

import torch
from tqdm import tqdm

from scripts.common.files import write_json
from scripts.release.architecture import LAYERS
from scripts.release.arguments import parser_of
from scripts.release.checkpoint import Checkpoint, CheckpointError, write
from scripts.release.folders import replacing_folder
from scripts.train.checkpoints import (
    TRACKER,
    folder_of,
    iterations_on_disk,
    tracked_iteration,
    write_tracker,
)


def choose(run: Path, last: int, every: int | None) -> list[Path]:
    """Lists the checkpoints of a run to average, oldest first.

    Args:
        run: the folder of the run's checkpoints.
        last: how many, ending with the one that the tracker names.
        every: iterations between them; None takes the last ones that exist.

    Raises:
        CheckpointError: one of them is missing.
    """
    end = tracked_iteration(run)
    if end is None:
        raise CheckpointError(f"{run} is no run: {TRACKER} is missing or names no iteration")
    present = [iteration for iteration in iterations_on_disk(run) if iteration <= end]
    chosen = range(end - (last - 1) * every, end + 1, every) if every else present[-last:]
    missing = sorted(set(chosen) - set(present))
    if missing or len(chosen) < last:
        raise CheckpointError(
            f"{run} lacks {'iterations ' + ', '.join(map(str, missing)) if missing else 'some'} "
            f"for an average of {last} checkpoints; it has {', '.join(map(str, present))}"
        )
    return [folder_of(run, iteration) for iteration in chosen]


def average(checkpoints: list[Checkpoint], output: Path) -> None:
    """Writes the plain average of the weights as a checkpoint of the last one's iteration.

    Raises:
        CheckpointError: the checkpoints hold different tensors.
    """
    final = checkpoints[-1]
    shapes = {name: entry.size for name, entry in final.tensors.items()}
    for checkpoint in checkpoints:
        if {name: entry.size for name, entry in checkpoint.tensors.items()} != shapes:
            raise CheckpointError(f"{checkpoint.folder} and {final.folder} are different models")

    averaged = {}
    for name, shape in tqdm(shapes.items(), unit="tensor", desc="average", disable=None):
        total = torch.zeros(shape, dtype=torch.float32)
        for checkpoint in checkpoints:
            total += checkpoint.read(name)
        averaged[name] = total / len(checkpoints)

    num_layers = next(shape[0] for name, shape in shapes.items() if name.startswith(LAYERS))
    iterations = [checkpoint.iteration for checkpoint in checkpoints]
    kept = ("args", "checkpoint_version", "iteration")
    common_state = {key: final.common_state[key] for key in kept if key in final.common_state}
    with replacing_folder(output) as folder:
        iteration_folder = folder_of(folder, final.iteration)
        iteration_folder.mkdir()
        write(iteration_folder, averaged, num_layers, common_state | {"averaged": iterations})
        write_json(folder / "average.json", {"iterations": iterations, "dtype": "float32"})
        write_tracker(folder, final.iteration)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, help="folder of a run's checkpoints")
    which.add_argument("--checkpoints", type=Path, nargs="+", help="folders iter_XXXXXXX")
    parser.add_argument("--last", type=int, default=8, help="how many of --run (default: 8)")
    parser.add_argument("--every", type=int, help="iterations between them (default: as saved)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    try:
        folders = arguments.checkpoints or choose(arguments.run, arguments.last, arguments.every)
        average([Checkpoint(folder) for folder in folders], arguments.output)
    except (CheckpointError, OSError) as error:
        sys.exit(f"average: {error}")


if __name__ == "__main__":
    main()
