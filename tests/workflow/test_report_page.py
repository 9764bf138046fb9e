"""The report's page of the smoke run, compared with what other readers find in the run's files."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest

from tests.workflow.conftest import Checkout

FIGURES = ("lengths", "ranks", "loss", "learning_rate", "gradient", "throughput")


@pytest.fixture
def page(smoke_run: Checkout) -> str:
    return (smoke_run.path / "smoke/artifacts/report/overview.html").read_text(encoding="utf-8")


def test_the_page_has_the_tokens_and_documents_of_every_phase(smoke_run, page):
    for path in (smoke_run.path / "smoke/data/converted").glob("*.manifest.parquet"):
        shards = pd.read_parquet(path)
        assert f">{shards['tokens'].sum():,}<" in page
        assert f">{shards['documents'].sum():,}<" in page


def test_the_page_has_the_runs_last_iteration_and_held_out_loss(smoke_run, page):
    log = smoke_run.path / "smoke/artifacts/logs/smoke.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    held_out = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert f"<dd>{max(line['iteration'] for line in lines):,}</dd>" in page
    assert f"<dd>{held_out[-1]:.3f}</dd>" in page


def test_the_page_has_a_row_for_each_checkpoint_on_the_disk(smoke_run, page):
    folders = (smoke_run.path / "smoke/artifacts/checkpoints/smoke").glob("iter_*")
    assert [folder.name for folder in folders if folder.name not in page] == []


def test_the_page_says_that_the_export_is_equal_and_shows_samples(smoke_run, page):
    samples = json.loads(
        (smoke_run.path / "smoke/artifacts/report/generations.json").read_text(encoding="utf-8")
    )
    assert "equal to the trained model" in page
    assert "NOT equal" not in page
    assert samples["continuations"][0]["prompt"] in page


def test_the_page_needs_nothing_from_outside(page):
    assert page.count("<svg ") == len(FIGURES)
    assert re.findall(r"\bsrc=|@import|<link|url\((?!#)", page) == []


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_well_formed_and_have_a_dark_side(smoke_run, name):
    path = Path(smoke_run.path / f"smoke/artifacts/report/{name}.svg")
    svg = ElementTree.parse(path).getroot()
    assert svg.attrib["aria-label"]
    assert "prefers-color-scheme:dark" in path.read_text(encoding="utf-8")


def test_the_page_shows_what_inspection_found_also_where_that_is_a_failure(finished: Checkout):
    name = "part-00001.parquet"
    raw = finished.path / "smoke/data/parquet/phase4" / name
    content = raw.read_bytes()
    pd.read_parquet(raw).assign(rank=float("nan")).to_parquet(raw)
    assert name in finished.smoke("inspect_phase4", succeeds=False)
    raw.write_bytes(content)
    (finished.path / "smoke/artifacts/report/overview.html").unlink()
    finished.smoke("smoke/artifacts/report/overview.html")
    page = (finished.path / "smoke/artifacts/report/overview.html").read_text(encoding="utf-8")
    findings = page[page.index("What inspection found") : page.index("What conversion met")]
    assert name in findings
