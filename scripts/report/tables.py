"""The tables of the report's page, from the files that the stages left behind.

Each function returns rows for people: lists of dicts, column → text. What a run has not made yet
gives an empty table, which the page leaves out.
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from scripts.common.files import read_json
from scripts.data.lineage import consumed
from scripts.data.phase_reader import PhaseIndex
from scripts.report.steps import History
from scripts.report.text import size
from scripts.train.checkpoints import folder_of, iterations_on_disk
from scripts.train.run import Run
from scripts.train.step_log import duration

Rows = list[dict[str, str]]
PACKAGES = ("snakemake", "torch", "megatron-core", "transformers", "tokenizers", "fastokens")


def data_rows(indices: list[PhaseIndex]) -> Rows:
    """Returns documents, tokens and bytes of each phase, and of all."""
    manifests = [index.manifest for index in indices]
    rows = []
    for index, manifest in zip(indices, manifests, strict=True):
        shards = manifest.table
        ranks = [shards[name].drop_null().to_numpy() for name in ("rank_min", "rank_max")]
        rows.append(
            {
                "phase": str(manifest.phase),
                "order": index.facts["order"].replace("_", " "),
                "shards": f"{len(manifest):,}",
                "documents": f"{manifest.documents:,}",
                "tokens": f"{manifest.tokens:,}",
                ".bin": size(int(shards["bin_bytes"].to_numpy().sum())),
                "tokens a document": f"{manifest.tokens / max(1, manifest.documents):,.0f}",
                "held out": f"{index.facts['valid']['documents']:,}",
                "rank": f"{ranks[0].min():.4g} to {ranks[1].max():.4g}" if len(ranks[0]) else "",
            }
        )
    if len(rows) > 1:
        bin_bytes = sum(int(m.table["bin_bytes"].to_numpy().sum()) for m in manifests)
        documents = sum(manifest.documents for manifest in manifests)
        tokens = sum(manifest.tokens for manifest in manifests)
        rows.append(
            dict.fromkeys(rows[0], "")
            | {
                "phase": "all",
                "shards": f"{sum(len(manifest) for manifest in manifests):,}",
                "documents": f"{documents:,}",
                "tokens": f"{tokens:,}",
                ".bin": size(bin_bytes),
                "tokens a document": f"{tokens / max(1, documents):,.0f}",
            }
        )
    return rows


def order_rows(reports: list[dict[str, Any]]) -> Rows:
    """Returns what scripts/data/inspect_order.py says of each phase."""
    return [
        {
            "phase": str(report["phase"]),
            "order": report["order"].replace("_", " "),
            "shards in training order": f"{report['ascending_shards']:,} of {report['shards']:,}",
            "equal ranks": f"{report['equal_ranks']:,}" if "equal_ranks" in report else "",
            "read before a jump": size(report["stretch_bytes"]),
        }
        for report in reports
    ]


def conversion_rows(indices: list[PhaseIndex]) -> Rows:
    """Returns what conversion met in each phase that a person should know of.

    Shards that were removed after training are left out.
    """
    rows = []
    for index in indices:
        paths = (Path(f"{prefix}.json") for prefix in index.manifest.prefixes)
        sidecars = [read_json(path) for path in paths if path.exists()]
        seconds = sum(sidecar["seconds"] for sidecar in sidecars)
        read = sum(sidecar["source"]["bytes"] for sidecar in sidecars)
        rows.append(
            {
                "phase": str(index.manifest.phase),
                "shards": f"{len(sidecars):,}",
                "rows": total(sidecar["rows"] for sidecar in sidecars),
                "skipped: null": total(sidecar["skipped"]["null"] for sidecar in sidecars),
                "skipped: empty": total(sidecar["skipped"]["empty"] for sidecar in sidecars),
                "invalid UTF-8": total(sidecar["invalid_utf8"] for sidecar in sidecars),
                "special tokens in text": total(s["special_token_text"] for s in sidecars),
                "engines": ", ".join(
                    sorted({f"{s['engine']} {s['engine_version']}" for s in sidecars})
                ),
                "Parquet": size(read),
                "a conversion": f"{size(read / seconds)}/s" if seconds else "",
            }
        )
    return rows


def without_empty_columns(rows: Rows) -> Rows:
    """Returns the rows without the columns that say nothing in any of them."""
    filled = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    return [{name: row[name] for name in filled} for row in rows]


def total(counts: Iterable[int]) -> str:
    """Returns a sum as text."""
    return f"{sum(counts):,}"


def training_rows(run: Run, history: History) -> Rows:
    """Returns how each phase went."""
    rows = []
    for phase, steps in history.steps.groupby("phase"):
        marker = run.marker(int(phase))
        stops = sum(stop.iteration in steps.index for stop in history.interruptions)
        mfu = steps["mfu"].astype(float).median()
        rows.append(
            {
                "phase": str(phase),
                "iterations": f"{steps.index[0]:,} to {steps.index[-1]:,}",
                "tokens": f"{read_json(marker)['tokens']:,}" if marker.exists() else "not complete",
                "of its data": f"{steps['data_position'].iloc[-1]:.1%}",
                "loss, first": f"{steps['loss'].iloc[0]:.3f}",
                "loss, last tenth": f"{steps['loss'].iloc[-max(1, len(steps) // 10) :].mean():.3f}",
                "time in steps": duration(steps["seconds"].sum()),
                "tokens/s": f"{steps['tokens_per_second'].median():,.0f}",
                "MFU": "" if pd.isna(mfu) else f"{mfu:.1%}",
                "interruptions": str(stops),
            }
        )
    return without_empty_columns(rows)


def interruption_rows(history: History) -> Rows:
    """Returns when the run was interrupted and how much was lost."""
    return [
        {
            "went on after iteration": f"{stop.iteration:,}",
            "at": pd.Timestamp(stop.time, unit="s").strftime("%Y-%m-%d %H:%M:%S UTC"),
            "steps run again": f"{stop.repeated:,}",
        }
        for stop in history.interruptions
    ]


def checkpoint_rows(run: Run, indices: list[PhaseIndex], global_batch_size: int) -> Rows:
    """Returns which data each checkpoint on the disk has consumed, the newest one first."""
    markers = [run.marker(index.manifest.phase) for index in indices]
    ends = [read_json(marker)["last_iteration"] for marker in markers if marker.exists()]
    starts = [0, *ends]
    rows = []
    for iteration in reversed(iterations_on_disk(run.checkpoints)):
        number = sum(iteration > end for end in ends)  # of the phase, from 0
        if number == len(indices):
            continue
        index = indices[number]
        facts = consumed(index, (iteration - starts[number]) * global_batch_size)
        tokens = iteration * global_batch_size * index.facts["sequence_length"]
        rank = facts["rank"]
        rows.append(
            {
                "checkpoint": folder_of(run.checkpoints, iteration).name,
                "phase": str(index.manifest.phase),
                "tokens of the run": f"{tokens:,}",
                "documents of the phase": f"{facts['documents']:,}",
                "shards": f"{facts['shards']:,} of {len(index.manifest):,}",
                "rank": f"{rank['min']:.4g} to {rank['max']:.4g}" if rank else "",
                "data digest": index.facts["digest"][:12],
            }
        )
    return without_empty_columns(rows)


def verdict_rows(verdict: dict[str, Any]) -> Rows:
    """Returns how close the exported model's logits are to Megatron's, text by text."""
    return [
        {
            "text": text["name"],
            "tokens": f"{text['tokens']:,}",
            "largest difference of logits": f"{text['max_abs_error']:.2e}",
            "same likeliest token": f"{text['argmax_agreement']:.2%}",
            "verdict": "equal" if text["passed"] else "DIFFERENT",
        }
        for text in verdict["texts"]
    ]


def held_out_rows(groups: list[dict[str, Any]]) -> Rows:
    """Returns the exported model's loss on held-out text."""
    return [
        {
            "text": group["name"],
            "documents": f"{group['documents']:,}",
            "tokens": f"{group['tokens']:,}",
            "loss (nats a token)": f"{group['loss']:.4f}",
            "bits a byte": f"{group['bits_per_byte']:.4f}",
        }
        for group in groups
    ]


def benchmark_rows(summary: dict[str, Any]) -> Rows:
    """Returns the scores of the benchmarks, and the published averages to set them beside."""
    rows = [
        {
            "model": "this one",
            "task": task,
            "metric": scores["metric"],
            "score": f"{scores['score']:.2f}",
        }
        for task, scores in summary["tasks"].items()
    ]
    average = {"model": "this one", "task": "average of these tasks", "metric": ""}
    rows.append(average | {"score": f"{summary['average']:.2f}"})
    published = {"task": "published average, tasks not named", "metric": ""}
    for model, score in summary["published_averages"].items():
        rows.append({"model": model} | published | {"score": f"{score:.2f}"})
    return rows


def sample_rows(samples: list[dict[str, Any]]) -> Rows:
    """Returns prompts with their continuations by each checkpoint, oldest first."""
    rows: dict[str, dict[str, str]] = {}
    for sample in sorted(samples, key=lambda sample: sample["iteration"]):
        for item in sample["continuations"]:
            row = rows.setdefault(item["prompt"], {"prompt": item["prompt"]})
            row[f"iteration {sample['iteration']:,}"] = item["continuation"]
    return list(rows.values())


def environment_rows(run: Run) -> Rows:
    """Returns the versions that each phase began with, and those that this report was made with."""
    rows = []
    if run.record.exists():
        for phase, record in read_json(run.record)["phases"].items():
            versions = {name: value or "" for name, value in record["environment"].items()}
            versions["git_commit"] = versions.get("git_commit", "")[:12]
            rows.append({"what": f"phase {phase}", "begun": record["begun"], **versions})
    return rows


def machine_rows() -> Rows:
    """Returns the machine and the versions that this page was made with."""
    memory = psutil.virtual_memory().total
    rows = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {size(memory)} of memory",
        "system": platform.platform(),
        "Python": platform.python_version(),
    }
    rows |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return [{"what": name, "version": version} for name, version in rows.items()]
