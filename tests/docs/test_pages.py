"""The pages say what is true of the program: links, messages, unverified settings."""

import re

import pytest

from scripts.common.settings import PARAMETERS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = [
    path
    for folder in ("scripts", "rules", "envs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".smk")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    pages = [link for link in links if "benchmarks/" not in link]
    assert [link for link in pages if not (page.parent / link).exists()] == []


def test_every_message_of_the_troubleshooting_page_is_one_of_the_program():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = page.split("## Snakemake's own tools")[0]
    fragments = re.findall(r"^\| `([^`]+)` \|", messages, flags=re.MULTILINE)
    program = "\n".join([path.read_text("utf-8") for path in SOURCES])
    program = re.sub(r'"\s*\n\s*f?"', "", program + (ROOT / "Makefile").read_text("utf-8"))
    missing = [f for f in fragments if not all(part in program for part in re.split(r" ?… ?", f))]
    assert len(fragments) > 25
    assert missing == []


UNVERIFIED = [
    *((PARAMETERS / "qwen3_1p7b" / f"{kind}.yaml") for kind in ("model", "hparams", "data")),
    ROOT / "config.yaml",
]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/deviations.md"])
@pytest.mark.parametrize("file", UNVERIFIED, ids=lambda file: file.name)
def test_the_settings_that_are_marked_unverified_are_those_that_are_listed(page, file):
    settings = file.read_text(encoding="utf-8")
    marked = re.findall(r"^ *(\w+):.*# .*unverified", settings, flags=re.MULTILINE)
    text = (ROOT / page).read_text(encoding="utf-8").split("## Settings known from summaries")[0]
    rows = re.findall(rf"^\| `{file.name}`(?: \||:)(.*)$", text, flags=re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert marked
    assert sorted(listed) == sorted(marked)


def test_files_that_the_original_map_names_exist():
    text = (ROOT / "docs/original.md").read_text(encoding="utf-8")
    ours = re.findall(r"`(scripts/\w+/\w+\.py)`", text)
    assert len(ours) > 5
    assert [path for path in ours if not (ROOT / path).exists()] == []
