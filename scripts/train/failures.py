"""Why the ranks ended by themselves, and which documents a broken step had read."""

from pathlib import Path

from scripts.common.files import read_json, replacing
from scripts.train.phases import Plan
from scripts.train.run import Run

NOT_A_NUMBER = 17
MEGATRON_MESSAGES = {
    16: "Megatron's rerun state machine asks for a restart",
    17: "Megatron's rerun state machine found a persistent fault",
}


def read_failure(run: Run, plan: Plan, global_batch_size: int) -> tuple[int, str] | None:
    """Returns the exit code and the message of a rank that failed, None if none did."""
    if not run.failure.exists():
        return None
    failure = read_json(run.failure)
    code = failure["exit_code"]
    message = failure.get("message") or MEGATRON_MESSAGES.get(code, f"Megatron ended with {code}")
    if code == NOT_A_NUMBER and "iteration" in failure:
        message += "; " + trace(run, plan, failure["iteration"], global_batch_size)
    return code, message


def trace(run: Run, plan: Plan, iteration: int, global_batch_size: int) -> str:
    """Lists the documents of an iteration in a file; returns a sentence about them."""
    from scripts.data.lineage import documents_of
    from scripts.data.phase_reader import read_index

    first = (iteration - plan.start_iteration - 1) * global_batch_size
    table = documents_of(read_index(Path(plan.index)), first, first + global_batch_size)
    path = run.state / f"iteration_{iteration}_documents.csv"
    with replacing(path) as partial:
        table.to_csv(partial, index=False)
    row = table.iloc[0]
    return (
        f"the {len(table)} documents that it had read (the first is number {row.document} of "
        f"{row.shard}) are listed in {path}. If they are to blame, add {iteration} to "
        "runtime.skip_iterations and run again to go on without them"
    )
