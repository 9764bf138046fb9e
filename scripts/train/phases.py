"""How long a phase is and where it lies in the run: the plan that a launch hands to its ranks.

A run is one sequence of iterations over all phases. A phase's first iteration follows the last one
of the phase before it, which that phase's marker states; its own length comes from data.yaml
(`length`) and from the samples that the phase's index has.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.common.files import read_json
from scripts.train.run import Run, RunError


@dataclass(frozen=True)
class Plan:
    """One phase of a run. Iterations are counted over the whole run; `samples` are sequences."""

    train_name: str
    phase: int
    start_iteration: int
    last_iteration: int
    transitions: list[int]
    samples: int
    validation_iterations: int
    run_iterations: int | None
    keep: list[int]
    learning_rate: dict
    index: str
    gpus: int
    checkpoint_minutes: float
    step_log: str
    failure: str
    ranks_lock: str

    def as_dict(self) -> dict:
        """Returns the plan as pretrain.py reads it."""
        return asdict(self)


def phase_iterations(length: str | dict, samples: int, hparams: dict, where: str) -> int:
    """Returns a phase's iterations.

    `length` is one_pass, {tokens: N} or {iterations: N}; `samples` are the sequences of its data.
    Raises RunError if the data do not suffice for one pass of that length.
    """
    batch, sequence_length = hparams["global_batch_size"], hparams["sequence_length"]
    available = samples // batch
    if length == "one_pass":
        wanted = available
    elif "tokens" in length:
        wanted = length["tokens"] // (batch * sequence_length)
    else:
        wanted = length["iterations"]
    if wanted < 1:
        raise RunError(
            f"{where}: {samples:,} samples of {sequence_length} tokens, length {length}: that is less "
            f"than one iteration of {batch} sequences; give the phase more data or a greater length"
        )
    if wanted > available:
        raise RunError(
            f"{where}: {wanted:,} iterations need {wanted * batch:,} samples, the data have {samples:,}: "
            f"more than one pass; shorten the phase to at most {available:,} iterations or add data"
        )
    return wanted


def plan_phase(run: Run, phase: int, index_path: Path, recipe: dict, runtime: dict) -> Plan:
    """Returns the plan of a phase; raises RunError if an earlier phase is not complete."""
    hparams, index = recipe["hparams"], read_json(index_path)
    ends = [marker["last_iteration"] for marker in earlier_markers(run, phase)]
    start = ends[-1] if ends else 0
    settings = recipe["data"]["phases"][phase - 1]
    iterations = phase_iterations(
        settings["length"],
        index["train"]["samples"],
        hparams,
        f"data.yaml, phases, entry {phase}, length",
    )
    last = start + iterations
    return Plan(
        train_name=run.name,
        phase=phase,
        start_iteration=start,
        last_iteration=last,
        transitions=ends,
        samples=index["train"]["samples"],
        validation_iterations=_validation_iterations(hparams, index),
        run_iterations=None,
        keep=_averaged(hparams, start, last),
        learning_rate=hparams["learning_rate"],
        index=str(index_path),
        gpus=runtime["gpus"],
        checkpoint_minutes=runtime.get("checkpoint_minutes", 0),
        step_log=str(run.step_log),
        failure=str(run.failure),
        ranks_lock=str(run.ranks_lock),
    )


def earlier_markers(run: Run, phase: int) -> list[dict]:
    """Returns the markers of the phases before `phase`, in order."""
    markers = []
    for earlier in range(1, phase):
        path = run.marker(earlier)
        if not path.exists():
            raise RunError(
                f"phase {phase} follows phase {earlier}, which is not complete: {path} is missing; "
                f"train phase {earlier} first"
            )
        markers.append(read_json(path))
    return markers


def _validation_iterations(hparams: dict, index: dict) -> int:
    """Returns the iterations of one evaluation; 0 where the phase has too few validation samples."""
    samples = min(hparams["validation"]["samples"], index["valid"]["samples"])
    return samples // hparams["global_batch_size"]


def _averaged(hparams: dict, start: int, last: int) -> list[int]:
    """Returns the iterations, from this phase's end back, whose checkpoints averaging may need."""
    averaging = hparams["averaging"]
    iterations = (last - k * averaging["interval"] for k in range(averaging["checkpoints"]))
    return sorted(iteration for iteration in iterations if iteration > start)
