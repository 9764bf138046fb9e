"""Wrong settings are refused by name; the commands of the README are accepted."""

import pytest

from tests.workflow.conftest import Checkout


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("runtime={gpu: 8}", "runtime.gpu: unknown setting; did you mean gpus?"),
        ("runtime={gpus: many}", "runtime.gpus: 'many' is not of type 'integer'"),
        ("runtime={gpus: -1}", "runtime.gpus: -1 is less than the minimum of 0"),
        ("recipe={source: ftp}", "recipe.source: 'ftp' is not one of folder, hub, python_library"),
        ("model=gpt4", "there is no scripts/params/gpt4; there are: cpu_smoke, gpt_smoke"),
        ("phases=9", "phases: 9 phases, but scripts/params/cpu_smoke/data.yaml describes 5"),
        (
            "runtime={sorted_phases: [2, 6]}",
            "runtime.sorted_phases: the run has phases 1 to 5 and no 6: leave that out, or raise",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    checkout: Checkout, setting: str, answer: str
) -> None:
    output = checkout.smoke("converted_all", "--dry-run", "--config", setting, succeeds=False)
    assert answer in output
    assert "Traceback" not in output


def test_a_wrong_parameter_file_is_named(checkout: Checkout) -> None:
    model = checkout.path / "scripts/params/cpu_smoke/model.yaml"
    model.write_text(model.read_text() + "num_heads: 4\n")
    output = checkout.smoke("converted_all", "--dry-run", succeeds=False)
    assert "scripts/params/cpu_smoke/model.yaml" in output
    assert "num_heads: unknown setting" in output


@pytest.mark.parametrize(
    "command",
    [
        "--cores 64 converted_all",
        "-n train_phase3",
        "train_phase3 --resources gpu=8",
        "converted_phase1",
        "train_all",
        "export",
        "report",
    ],
)
def test_the_documented_commands_plan_on_a_machine_without_gpus(
    checkout: Checkout, command: str
) -> None:
    arguments = [argument for argument in command.split() if argument != "-n"]
    assert checkout.planned(*arguments)


@pytest.mark.parametrize(
    "target", ["converted_all", "train_phase3", "inspect_all", "download_all", "all"]
)
def test_a_phase_without_data_says_what_to_do(checkout: Checkout, target: str) -> None:
    output = checkout.run("--dry-run", target, succeeds=False)
    assert "no Parquet files of phase 1" in output
    assert "data/parquet/phase1" in output
    assert "set recipe.source: hub" in output
    assert "Traceback" not in output


def test_the_number_of_phases_comes_from_the_configuration(checkout: Checkout) -> None:
    plan = checkout.planned("train_all", "--config", "phases=2")
    assert plan["train"] == 2
    assert "train_phase3" not in checkout.smoke("--list-rules", "--config", "phases=2")
