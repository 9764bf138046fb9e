"""What a run is: recorded when its phases begin, compared at every launch.

run_state/<train_name>/run.json holds what matters for the result: model, hyper-parameters, data,
tokenizer. A launch that differs in one of these is refused, with the settings' names. What does not
matter (GPUs, micro batch, intervals, workers, paths) is not in it and may change at any time.
"""

import importlib.metadata
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from scripts.common.files import read_json, replacing, sha256, write_json
from scripts.train.checkpoints import iterations_on_disk
from scripts.train.phases import Plan
from scripts.train.run import Run, RunError

# Parts of hparams.yaml that leave the trained weights as they are.
WITHOUT_EFFECT = ("validation", "averaging")
PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")


def identity_of(phase: int, recipe: dict, index: dict, tokenizer: Path) -> dict[str, Any]:
    """Returns what matters for the result, in two parts: of the whole run, and of its phase."""
    hparams = {
        key: recipe["hparams"][key] for key in recipe["hparams"] if key not in WITHOUT_EFFECT
    }
    table = hparams.pop("learning_rate")
    data = {key: value for key, value in recipe["data"].items() if key != "phases"}
    return {
        "run": {
            "model": recipe["model"],
            "hparams": hparams,
            "tokenizer_sha256": sha256(tokenizer / "tokenizer.json"),
        },
        "phase": {
            "learning_rate": table,
            "data": data | recipe["data"]["phases"][phase - 1] | {"digest": index["digest"]},
        },
    }


def check_identity(run: Run, plan: Plan, recipe: dict, index: dict, tokenizer: Path) -> None:
    """Compares a launch with the run's record and enters a phase that begins.

    Raises RunError, naming each setting, if something that matters differs.
    """
    identity = identity_of(plan.phase, recipe, index, tokenizer)
    check_tokenizer(index, identity["run"]["tokenizer_sha256"], tokenizer)
    record = read_record(run)
    check_marker_before(run, plan, record)
    phase = record["phases"].get(str(plan.phase))
    if record["identity"] is not None:
        refuse_difference(run, f"run {run.name}", record["identity"], identity["run"])
    if phase is not None:
        refuse_changed_data(run, plan, phase["identity"], identity["phase"])
        refuse_difference(
            run, f"phase {plan.phase} of run {run.name}", phase["identity"], identity["phase"]
        )
        return
    copy_manifest(run, plan, index)
    record["identity"] = identity["run"]
    record["phases"][str(plan.phase)] = {
        "identity": identity["phase"],
        "start_iteration": plan.start_iteration,
        "last_iteration": plan.last_iteration,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "environment": environment(),
    }
    write_json(run.record, record)


def check_marker_before(run: Run, plan: Plan, record: dict) -> None:
    """Refuses a phase whose predecessor's marker and the run's own record do not agree."""
    before = plan.phase - 1
    if before == 0:
        return
    recorded = record["phases"].get(str(before), {})
    marker = read_json(run.marker(before))
    for name in ("last_iteration", "checkpoint_sha256"):
        if marker[name] != recorded.get(name):
            raise RunError(
                f"{run.marker(before)} says {name} {marker[name]}, the run's record {run.record} "
                f"says {recorded.get(name)}: delete the marker and train phase {before} again, "
                "which costs a second where it is complete"
            )


def read_record(run: Run) -> dict:
    """Returns the run's record, an empty one for a run that begins."""
    if run.record.exists():
        return read_json(run.record)
    if iterations_on_disk(run.checkpoints):
        raise RunError(
            f"{run.checkpoints} holds checkpoints, but {run.record}, which says what they are, is "
            "missing: put it back, or choose another train_name"
        )
    return {"train_name": run.name, "identity": None, "phases": {}}


def note_completion(run: Run, phase: int, checkpoint_sha256: str) -> None:
    """Enters that a phase is complete, with the digest of its last checkpoint's integrity.json."""
    record = read_record(run)
    record["phases"][str(phase)]["checkpoint_sha256"] = checkpoint_sha256
    write_json(run.record, record)


def noted_completion(run: Run, phase: int) -> str | None:
    """Returns what `note_completion` entered, None for a phase that is not complete."""
    return read_record(run)["phases"].get(str(phase), {}).get("checkpoint_sha256")


def phase_ends(run: Run) -> list[int]:
    """Returns the last iterations of the phases that have begun."""
    record = read_json(run.record) if run.record.exists() else {"phases": {}}
    return sorted(phase["last_iteration"] for phase in record["phases"].values())


def difference(before: Any, now: Any, name: str = "") -> list[str]:
    """Names the settings that differ between two JSON values, one line each."""
    if isinstance(before, dict) and isinstance(now, dict):
        lines = []
        for key in sorted(before.keys() | now.keys()):
            path = f"{name}.{key}" if name else key
            lines += difference(before.get(key), now.get(key), path)
        return lines
    return [] if before == now else [f"{name}: was {before}, is {now}"]


def refuse_difference(run: Run, what: str, before: dict, now: dict) -> None:
    """Raises RunError if two identities differ."""
    lines = difference(before, now)
    if lines:
        raise RunError(
            f"{what} was begun with other settings:\n  "
            + "\n  ".join(lines)
            + "\nPut them back to go on, or choose another train_name to begin a new run "
            f"(record: {run.record})"
        )


def refuse_changed_data(run: Run, plan: Plan, before: dict, now: dict) -> None:
    """Raises RunError, naming shards, if a phase that has begun has other data now."""
    if before["data"]["digest"] == now["data"]["digest"]:
        return
    changed = changed_shards(manifest_copy(run, plan.phase), manifest_of(plan))
    names = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    what = (
        f"these shards differ: {names}"
        if changed
        else "the shards are the same, their order is not"
    )
    raise RunError(
        f"phase {plan.phase} of run {run.name} was begun on other data; {what}. Restore the data "
        "(or the settings that order them), or choose another train_name to begin a new run"
    )


def changed_shards(before: Path, now: Path) -> list[str]:
    """Returns the names of shards whose content differs between two manifests."""
    import pyarrow.parquet as pq  # takes half a second, and is seldom needed

    columns = ["shard", "bin_sha256", "idx_sha256", "source_sha256"]
    rows = [
        {row["shard"]: row for row in pq.read_table(path, columns=columns).to_pylist()}
        for path in (before, now)
        if path.exists()
    ]
    if len(rows) < 2:
        return []
    return sorted(
        name for name in rows[0].keys() | rows[1].keys() if rows[0].get(name) != rows[1].get(name)
    )


def manifest_of(plan: Plan) -> Path:
    """Returns the manifest that the plan's index was made of."""
    index = Path(plan.index)
    return index.parent / read_json(index)["manifest"]["file"]


def manifest_copy(run: Run, phase: int) -> Path:
    """Returns where the manifest of a phase is kept as it was when the phase began."""
    return run.state / f"phase{phase}.manifest.parquet"


def copy_manifest(run: Run, plan: Plan, index: dict) -> None:
    """Keeps the manifest, so that a later change of the data can be named."""
    source = Path(plan.index).parent / index["manifest"]["file"]
    with replacing(manifest_copy(run, plan.phase)) as partial:
        shutil.copyfile(source, partial)


def check_tokenizer(index: dict, tokenizer_sha256: str, tokenizer: Path) -> None:
    """Refuses data that another tokenizer made."""
    of_data = index["common"]["recipe"]["tokenizer_sha256"]
    if of_data != tokenizer_sha256:
        raise RunError(
            f"the data were made with another tokenizer.json ({of_data[:16]}…) than that of "
            f"{tokenizer} ({tokenizer_sha256[:16]}…): name theirs, or convert the data again"
        )


def environment() -> dict[str, Any]:
    """Returns the versions that a phase begins with, for the record."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {"python": platform.python_version(), "git_commit": git_commit(), **packages}


def git_commit() -> str | None:
    """Returns this repository's commit, or None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
