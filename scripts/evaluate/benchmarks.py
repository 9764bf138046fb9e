"""Benchmarks of an exported model with lm-evaluation-harness.

    pip install -e '.[evaluate]'
    python scripts/evaluate/benchmarks.py --export MODEL_DIR --output benchmarks.json \\
        --tasks arc_easy arc_challenge hellaswag mmlu ceval-valid cmmlu gsm8k

Tasks are the harness's by name, or local ones: --include-path names a folder of its YAML files,
whose data sets may be local files too, so that a machine without a network can evaluate. A task
that executes what the model writes, such as humaneval, is refused without --run-generated-code.

The output holds each task's scores, the average of their main scores in per cent, and the averages
that the authors of Kaiyuan-2B published for it and for its peers. Those are over a benchmark set
that is not named: they show an order of magnitude, not a comparison task by task.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.common.files import replacing, write_json
from scripts.release.arguments import EXPORT, parser_of
from scripts.release.checkpoint import CheckpointError
from scripts.release.export import read_export
from scripts.release.hf_model import load_model

# Averages in the authors' figure; see docs/deviations.md.
PUBLISHED = {
    "Kaiyuan-2B": 59.07,
    "Qwen3-1.7B": 69.10,
    "Qwen2.5-1.5B": 65.99,
    "SmolLM3-3B": 64.63,
    "YuLan-Mini": 61.69,
    "Gemma2-2B": 52.40,
    "SmolLM2-1.7B": 51.37,
    "OLMo-2-1B": 48.89,
}
# A task's main score is the first of these that it has.
MAIN_METRICS = ("acc_norm", "exact_match", "pass@1", "acc")


class BenchmarkError(ValueError):
    """The benchmarks cannot be run; the message says why."""


def run_tasks(
    export: Path,
    tasks: list[str],
    include_path: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    run_generated_code: bool = False,
) -> dict[str, Any]:
    """Runs the harness; returns what it returns.

    Args:
        export: folder made by export.py.
        tasks: names of tasks or groups.
        include_path: folder of local tasks.
        limit: documents of each task; None for all.
        batch_size: requests at a time.
        run_generated_code: whether tasks may execute what the model writes (humaneval does).

    Raises:
        BenchmarkError: the harness is not installed or does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise BenchmarkError(
            "lm-evaluation-harness is not installed: pip install -e '.[evaluate]'"
        ) from error
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise BenchmarkError(f"the harness knows no task {', '.join(unknown)}")
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = HFLM(load_model(export), tokenizer=tokenizer, batch_size=batch_size)
    return simple_evaluate(
        model,
        tasks=tasks,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        confirm_run_unsafe_code=run_generated_code,
    )


def summarize(results: dict[str, Any], tasks: list[str]) -> dict[str, Any]:
    """Returns each task's scores, their average, and the published ones."""
    scores = {task: task_scores(results, task) for task in tasks}
    main = [score["score"] for score in scores.values()]
    return {"tasks": scores, "average": sum(main) / len(main), "published_averages": PUBLISHED}


def task_scores(results: dict[str, Any], task: str) -> dict[str, Any]:
    """Returns a task's scores: `score` in per cent, the metric it is, and all that were computed.

    The harness calls a metric "name,filter"; of several filters the last is the most lenient.
    """
    metrics = {
        name: value
        for name, value in results["results"][task].items()
        if isinstance(value, int | float) and "stderr" not in name and "," in name
    }
    by_name = {name.split(",")[0]: value for name, value in metrics.items()}
    metric = next((name for name in MAIN_METRICS if name in by_name), next(iter(by_name)))
    return {
        "metric": metric,
        "score": 100 * by_name[metric],
        "few_shot": results.get("n-shot", {}).get(task),
        "metrics": metrics,
    }


def table(summary: dict[str, Any]) -> str:
    """Returns the scores as CSV: model, task, metric, score in per cent."""
    rows = [
        f"this model,{task},{scores['metric']},{scores['score']:.2f}"
        for task, scores in summary["tasks"].items()
    ]
    rows.append(f"this model,average of these tasks,,{summary['average']:.2f}")
    rows += [
        f"{model},published average (other tasks),,{average:.2f}"
        for model, average in summary["published_averages"].items()
    ]
    return "\n".join(["model,task,metric,score", *rows]) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--export", type=Path, required=True, help=EXPORT)
    parser.add_argument("--tasks", nargs="+", required=True, help="names of the harness's tasks")
    parser.add_argument("--include-path", type=Path, help="folder of local tasks")
    parser.add_argument("--limit", type=int, help="documents of each task (default: all)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests (default: 8)")
    parser.add_argument(
        "--run-generated-code", action="store_true", help="humaneval executes what the model writes"
    )
    parser.add_argument("--output", type=Path, required=True, help="results, JSON")
    parser.add_argument("--table", type=Path, help="the same as CSV")
    arguments = parser.parse_args(argv)
    try:
        read_export(arguments.export)
        results = run_tasks(
            arguments.export,
            arguments.tasks,
            arguments.include_path,
            arguments.limit,
            arguments.batch_size,
            arguments.run_generated_code,
        )
    except (BenchmarkError, CheckpointError) as error:
        sys.exit(f"benchmarks: {error}")
    summary = summarize(results, arguments.tasks)
    write_json(arguments.output, summary)
    if arguments.table:
        with replacing(arguments.table) as partial:
            partial.write_text(table(summary), encoding="utf-8")
    print(table(summary), end="")


if __name__ == "__main__":
    main()
