from scripts.common.files import write_json
from scripts.report.hooks import message
from tests.report.run_files import (
    parameters,
    run_of,
    settings_in,
    write_marker,
    write_parquet,
)


def test_the_start_says_what_is_left(tmp_path):
    settings = settings_in(tmp_path)
    for phase in (1, 2):
        write_parquet(settings, phase, shards=3)
    text = message(settings, parameters(), "start", [])
    assert text.startswith("run run on ")
    assert "6 shards, 6.00kB of Parquet" in text


def test_success_says_how_training_stands(tmp_path):
    settings = settings_in(tmp_path)
    for phase in (1, 2):
        write_marker(run_of(settings), phase, phase, phase)
    assert message(settings, parameters(), "success", []).endswith("all phases are complete")


def test_a_failure_names_its_reason_and_snakemakes_log(tmp_path):
    settings = settings_in(tmp_path)
    run = run_of(settings)
    run.make_folders()
    write_json(run.failure, {"message": "iteration 7: loss is not finite"})
    text = message(settings, parameters(), "failure", ["/somewhere/snakemake.log"])
    assert "failed: iteration 7: loss is not finite" in text
    assert "/somewhere/snakemake.log" in text
