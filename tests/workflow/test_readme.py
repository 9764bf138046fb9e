"""The commands of README.md: the cheap ones are run, the others planned, as a new user would."""

import re
import shlex
import subprocess

import pytest

from benchmarks.checkout import ROOT
from scripts.report.workflow_graph import diagram, insert
from tests.workflow.conftest import Checkout

PAGES = ("README.md", "README.zh.md")


def commands(page: str) -> list[tuple[str, ...]]:
    """Returns the commands of a page's shell blocks, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = (shlex.split(line, comments=True) for line in "".join(blocks).splitlines())
    return [tuple(line) for line in lines if line]


def of_program(program: str) -> list[tuple[str, ...]]:
    """Returns the arguments of a program's calls in README.md."""
    return [rest for name, *rest in commands("README.md") if name == program]


@pytest.fixture
def with_data(checkout: Checkout) -> Checkout:
    """A clone into which a user has put Parquet files and a tokenizer."""
    for phase in range(1, 6):
        folder = checkout.path / f"data/parquet/phase{phase}"
        folder.mkdir(parents=True)
        (folder / "part-00000.parquet").write_bytes(b"PAR1")
    (checkout.path / "data/tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (checkout.path / "data/tokenizer" / name).write_text("{}")
    return checkout


def test_every_command_of_the_readme_is_one_that_is_tested_here() -> None:
    assert {name for name, *_ in commands("README.md")} == {"make", "snakemake"}


def test_the_chinese_page_has_the_same_commands() -> None:
    assert commands("README.zh.md") == commands("README.md")


def test_the_chinese_page_has_the_same_sections_and_rows() -> None:
    shapes = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        rows = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
        names = [re.findall(r"`([^`]+)`|\]\((.*?)\)", row) for row in rows]
        shapes.append((len(re.findall(r"^## ", text, flags=re.MULTILINE)), names))
    assert shapes[1] == shapes[0]


@pytest.mark.parametrize("arguments", of_program("make"), ids=" ".join)
def test_make_knows_the_target(arguments: list[str]) -> None:
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [a for a in of_program("snakemake") if not {"--report", "plan", "status"} & set(a)],
    ids=" ".join,
)
def test_snakemake_plans_the_command(arguments: list[str], with_data: Checkout) -> None:
    if "profiles/slurm" in arguments:
        pytest.importorskip("snakemake_executor_plugin_slurm", reason="pip install -e '.[slurm]'")
    output = with_data.run(*arguments, *["--dry-run"] * ("-n" not in arguments))
    assert "convert" in output


def test_plan_and_status_answer_about_a_finished_run(finished: Checkout) -> None:
    assert ["plan"] in of_program("snakemake")
    assert ["status"] in of_program("snakemake")
    assert "training    nothing is left" in finished.smoke("plan")
    assert "OK: all phases are complete" in finished.smoke("status")


def test_the_report_command_writes_a_page(finished: Checkout) -> None:
    (arguments,) = [a for a in of_program("snakemake") if "--report" in a]
    finished.run(*arguments, "--configfile", "profiles/smoke/config.yaml")
    assert (finished.path / arguments[-1]).stat().st_size > 100_000


@pytest.mark.parametrize("page", PAGES)
def test_the_picture_is_the_snakefiles(page: str, checkout: Checkout) -> None:
    graph = subprocess.run(
        checkout.command("--profile", "profiles/smoke", "--rulegraph", "mermaid-js"),
        cwd=checkout.path,
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text = (ROOT / page).read_text(encoding="utf-8")
    assert insert(text, diagram(graph.stdout)) == text, "run `make docs`"
