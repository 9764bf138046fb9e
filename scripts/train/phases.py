"""How long a phase is and where it lies in the run: the plan that a launch hands to its ranks.

A run is one sequence of iterations over all phases. A phase's first iteration follows the last one
of the phase before it, which that phase's marker states; its own length comes from data.yaml
(`length`) and from the samples that the phase's index has.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.common.files import read_json
from scripts.train.checkpoints import checkpoint_bytes
from scripts.train.run import Run, RunError

# Settings of data.yaml that say what a token sees of other documents.
MASKS = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "dataloader_inter_document_masking",
)


@dataclass(frozen=True)
class Plan:
    """One phase of a run. Iterations are counted over the whole run; `samples` are sequences."""

    train_name: str
    phase: int
    start_iteration: int
    last_iteration: int
    transitions: list[int]
    samples: int
    run_iterations: int | None
    validation_iterations: int
    keep: list[int]
    learning_rate: dict
    masks: dict[str, bool]
    index: str
    gpus: int
    wandb: bool
    checkpoint_minutes: float
    checkpoint_bytes: int
    step_log: str
    failure: str
    ranks_lock: str

    def as_dict(self) -> dict:
        """Returns the plan as pretrain.py reads it."""
        return asdict(self)


def wanted_iterations(length: str | dict, samples: int, passes: int, hparams: dict) -> int:
    """Returns the iterations that a phase's `length` in data.yaml means.

    `samples` are the sequences of one pass over its data, `passes` how many it may take.
    """
    batch = hparams["global_batch_size"]
    if length == "one_pass":
        return samples // batch
    if length == "all_passes":
        return samples * passes // batch
    if "tokens" in length:
        return length["tokens"] // (batch * hparams["sequence_length"])
    return length["iterations"]


def phase_iterations(
    length: str | dict, samples: int, passes: int, hparams: dict, where: str
) -> int:
    """Returns a phase's iterations, see `wanted_iterations`.

    Raises RunError if the passes that are allowed do not suffice for that length.
    """
    batch, sequence_length = hparams["global_batch_size"], hparams["sequence_length"]
    wanted = wanted_iterations(length, samples, passes, hparams)
    available = samples * passes // batch
    if wanted < 1:
        raise RunError(
            f"{where}: {samples:,} samples of {sequence_length} tokens, length {length}: that is "
            f"less than one iteration of {batch} sequences; give the phase more data or length"
        )
    if wanted > available:
        raise RunError(
            f"{where}: {wanted:,} iterations need {wanted * batch:,} samples, one pass over the "
            f"data has {samples:,}, so that would be more than {passes} pass(es): shorten the "
            f"phase to at most {available:,} iterations, add data, or allow more (`passes`)"
        )
    return wanted


def plan_phase(
    run: Run,
    phase: int,
    index_path: Path,
    recipe: dict,
    runtime: dict,
    later_phases: list[dict] | None = None,
) -> Plan:
    """Returns the plan of a phase; raises RunError if an earlier phase is not complete.

    `later_phases`, {length, index} of each, serves only to say when the run will end.
    """
    hparams, data, index = recipe["hparams"], recipe["data"], read_json(index_path)
    check_batches(hparams, index, recipe["model"], runtime)
    ends = [marker["last_iteration"] for marker in earlier_markers(run, phase)]
    start = ends[-1] if ends else 0
    samples = index["train"]["samples"]
    length = data["phases"][phase - 1]["length"]
    last = start + phase_iterations(
        length, samples, index["passes"], hparams, f"data.yaml, phases, entry {phase}, length"
    )
    return Plan(
        train_name=run.name,
        phase=phase,
        start_iteration=start,
        last_iteration=last,
        transitions=ends,
        samples=samples,
        run_iterations=_run_iterations(last, phase, later_phases, hparams),
        validation_iterations=_validation_iterations(hparams, index),
        keep=_averaged(hparams, start, last),
        learning_rate=hparams["learning_rate"],
        masks={name: data[name] for name in MASKS},
        index=str(index_path),
        gpus=runtime["gpus"],
        wandb=bool(runtime.get("wandb_project")),
        checkpoint_minutes=runtime.get("checkpoint_minutes", 0),
        checkpoint_bytes=checkpoint_bytes(run.checkpoints, recipe["model"], hparams["precision"]),
        step_log=str(run.step_log),
        failure=str(run.failure),
        ranks_lock=str(run.ranks_lock),
    )


def check_batches(hparams: dict, index: dict, model: dict, runtime: dict) -> None:
    """Refuses sequences and batches that data, model and ranks cannot take."""
    length = hparams["sequence_length"]
    if index["sequence_length"] != length:
        raise RunError(
            f"the phase's index was made for sequences of {index['sequence_length']} tokens, "
            f"hparams.yaml says sequence_length {length}: make the index anew"
        )
    end_of_document = index["common"]["end_of_document_id"]
    if end_of_document >= model["padded_vocab_size"]:
        raise RunError(
            f"the data hold token {end_of_document}, model.yaml's padded_vocab_size is "
            f"{model['padded_vocab_size']}: the model does not fit the tokenizer"
        )
    if length > model["max_position_embeddings"]:
        raise RunError(
            f"hparams.yaml: sequence_length {length} exceeds model.yaml's "
            f"max_position_embeddings {model['max_position_embeddings']}"
        )
    ranks = (runtime["gpus"] or runtime.get("cpu_ranks", 1)) * runtime.get("nodes", 1)
    parallel = runtime.get("tensor_parallel", 1) * runtime.get("pipeline_parallel", 1)
    batch, micro_batch = hparams["global_batch_size"], runtime["micro_batch_size"]
    if ranks % parallel:
        raise RunError(
            f"{ranks} ranks cannot be split into tensor_parallel x pipeline_parallel = {parallel}"
        )
    at_a_time = micro_batch * ranks // parallel
    if batch % at_a_time:
        raise RunError(
            f"global_batch_size {batch} is no multiple of micro_batch_size {micro_batch} x "
            f"{ranks // parallel} model copies = {at_a_time}: change runtime.micro_batch_size"
        )


def _run_iterations(
    last: int, phase: int, later_phases: list[dict] | None, hparams: dict
) -> int | None:
    """Returns the last iteration of the run, None where a later phase has no index yet."""
    if later_phases is None:
        return None
    for number, later in enumerate(later_phases, phase + 1):
        if not Path(later["index"]).exists():
            return None
        index = read_json(Path(later["index"]))
        last += phase_iterations(
            later["length"],
            index["train"]["samples"],
            index["passes"],
            hparams,
            f"data.yaml, phases, entry {number}, length",
        )
    return last


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
    """Returns the iterations of one evaluation; 0 where the phase holds out too few samples."""
    samples = min(hparams["validation"]["samples"], index["valid"]["samples"])
    return samples // hparams["global_batch_size"]


def _averaged(hparams: dict, start: int, last: int) -> list[int]:
    """Returns the iterations, from this phase's end back, whose checkpoints averaging may need."""
    averaging = hparams["averaging"]
    iterations = (last - k * averaging["interval"] for k in range(averaging["checkpoints"]))
    return sorted(iteration for iteration in iterations if iteration > start)
