"""Puts figures and tables of a run into one page that opens offline, on light and on dark screens.

    python -m scripts.report.page --config config.yaml --figures FOLDER --output overview.html

The stages' files are found through config.yaml. Results that a run need not have (held-out loss,
benchmarks, samples, inspection, order) are given by name and left out where they are not.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt

from scripts.common.files import read_json, replacing
from scripts.common.settings import ROOT, load_parameters, load_settings
from scripts.data.phase_reader import PhaseIndex, read_index
from scripts.data.shards import configured_phase
from scripts.report import tables
from scripts.report.steps import History, read_history
from scripts.report.style import FONT, stylesheet
from scripts.train.run import Run
from scripts.train.step_log import duration

FIGURES = ("lengths", "ranks", "loss", "learning_rate", "gradient", "throughput")
RESULTS = ("verdict", "held_out", "benchmarks", "samples", "inspection", "order")
NUMBER = re.compile(r"[\d.,]+( ?[kMGTP]?B(/s)?|%|e[-+]\d+)?|")


def page_content(
    settings: dict[str, Any], figures: Path, results: dict[str, list[Path]]
) -> dict[str, Any]:
    """Returns the values of the template; `results` holds files by kind, each list may be empty."""
    run = Run(settings["train_name"], Path(settings["paths"]["artifacts"]))
    parameters = load_parameters(settings["model"])
    indices = [
        read_index(Path(f"{configured_phase(settings, phase).folder}.index.json"))
        for phase in range(1, settings["phases"] + 1)
    ]
    history = read_history(run.step_log)
    verdicts, held_out, benchmarks, samples, inspections, orders = (
        [read_json(path) for path in results[kind]] for kind in RESULTS
    )
    batch = parameters["hparams"]["global_batch_size"]
    return {
        "train_name": run.name,
        "model": settings["model"],
        "made": time.strftime("%Y-%m-%d %H:%M %Z"),
        "palette": stylesheet(":root"),
        "font": FONT,
        "facts": facts(history, indices, verdicts, batch),
        "figures": {name: svg(figures / f"{name}.svg") for name in FIGURES},
        "data": tables.data_rows(indices),
        "inspected": bool(inspections),
        "findings": [text for summary in inspections for text in summary["problems"]],
        "order": tables.order_rows(orders),
        "order_warnings": [text for report in orders for text in report["warnings"]],
        "conversion": tables.conversion_rows(indices),
        "training": tables.training_rows(run, history),
        "interruptions": tables.interruption_rows(history),
        "checkpoints": tables.checkpoint_rows(run, indices, batch),
        "verdict": [row for verdict in verdicts for row in tables.verdict_rows(verdict)],
        "passed": all(verdict["passed"] for verdict in verdicts),
        "held_out": [row for result in held_out for row in tables.held_out_rows(result["groups"])],
        "benchmarks": [row for result in benchmarks for row in tables.benchmark_rows(result)],
        "samples": tables.sample_rows(flat(samples)),
        "environment": tables.environment_rows(run),
        "machine": tables.machine_rows(),
        "settings": {
            "config.yaml": to_yaml(settings),
            **{f"{name}.yaml": to_yaml(values) for name, values in parameters.items()},
        },
        "deviations": deviations(),
    }


def flat(samples: list[Any]) -> list[dict[str, Any]]:
    """Returns all samples; a file holds those of one checkpoint or a list of several."""
    return [sample for part in samples for sample in (part if isinstance(part, list) else [part])]


def facts(
    history: History, indices: list[PhaseIndex], verdicts: list[dict], batch: int
) -> dict[str, str]:
    """Returns the few numbers that a reader wants first."""
    steps, held_out = history.steps, history.validation
    parameters = {"parameters": f"{verdicts[0]['parameters']:,}"} if verdicts else {}
    tokens = len(steps) * batch * indices[0].facts["sequence_length"]
    last = {"held-out loss": f"{held_out.iloc[-1]:.3f}"} if len(held_out) else {}
    return {
        **parameters,
        "tokens trained": f"{tokens:,}",
        "iterations": f"{steps.index[-1]:,}",
        **last,
        "time in steps": duration(steps["seconds"].sum()),
        "interruptions": str(len(history.interruptions)),
    }


def svg(path: Path) -> str:
    """Returns a figure to stand within a page: without the XML head; the page has the palette."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"<style>svg\{.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)


def to_yaml(value: Any) -> str:
    """Returns settings as YAML."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def deviations() -> str:
    """Returns docs/deviations.md as HTML, without its title and with headings of lower rank."""
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    html = MarkdownIt("commonmark").enable("table").render(text.split("\n", 1)[1])
    return html.replace("h2>", "h3>")


def numeric_columns(rows: tables.Rows) -> set[str]:
    """Returns the columns that hold numbers, to be aligned to the right."""
    return {name for name in rows[0] if all(NUMBER.fullmatch(row[name]) for row in rows)}


def render(content: dict[str, Any]) -> str:
    """Returns the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    environment.filters["numeric_columns"] = numeric_columns
    return environment.get_template("page.html.jinja").render(content)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", nargs="+", default=["config.yaml"], help="YAML files or JSON; later ones win"
    )
    parser.add_argument("--figures", type=Path, required=True, help="folder of the SVG files")
    for kind in RESULTS:
        option = f"--{kind.replace('_', '-')}"
        parser.add_argument(option, type=Path, nargs="*", default=[], help="results, JSON")
    parser.add_argument("--output", type=Path, required=True, help="HTML to write")
    arguments = parser.parse_args(argv)
    results = {
        kind: [path for path in getattr(arguments, kind) if path.exists()] for kind in RESULTS
    }
    try:
        settings = load_settings(*arguments.config)
        page = render(page_content(settings, arguments.figures, results))
    except (OSError, ValueError) as error:
        sys.exit(f"page: {error}")
    with replacing(arguments.output) as partial:
        partial.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
