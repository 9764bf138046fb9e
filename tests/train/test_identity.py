"""A run is what it was begun as."""

import shutil

import pytest

from scripts.common.files import read_json, write_json
from scripts.common.settings import phase_recipe
from scripts.train.identity import check_identity, phase_ends, read_record
from scripts.train.phases import plan_phase
from scripts.train.run import Run, RunError
from tests.data.phase_corpus import write_phase
from tests.train.small_run import RUNTIME, parameters, random_shard, write_data


@pytest.fixture
def run(tmp_path):
    result = Run("small", tmp_path / "artifacts")
    result.make_folders()
    return result


def check(run, data, settings=None, runtime=RUNTIME):
    index = data / "megatron_phase1.index.json"
    recipe = phase_recipe(settings or parameters(), 1)
    plan = plan_phase(run, 1, index, recipe, runtime)
    check_identity(run, plan, recipe, read_json(index), data / "tokenizer")


def test_a_run_that_begins_is_recorded_with_its_environment(run, data):
    check(run, data)
    record = read_json(run.record)
    assert record["identity"]["model"]["num_layers"] == 1
    assert record["phases"]["1"]["environment"]["torch"]
    assert phase_ends(run) == [20]


def test_what_does_not_matter_may_change(run, data):
    check(run, data)
    settings = parameters()
    settings["hparams"]["validation"]["interval"] = 50
    settings["hparams"]["averaging"]["checkpoints"] = 1
    settings["hparams"]["learning_rate"]["phases"][1] = [{"shape": "constant"}]
    settings["data"]["phases"][1]["length"] = "one_pass"
    check(run, data, settings, RUNTIME | {"micro_batch_size": 1, "checkpoint_interval": 99})


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("model", "hidden_size"), 32, "model.hidden_size: was 64, is 32"),
        (("hparams", "seed"), 5, "hparams.seed: was 1234, is 5"),
        (
            ("hparams", "optimizer", "weight_decay"),
            0.0,
            "hparams.optimizer.weight_decay: was 0.1, is 0.0",
        ),
        (
            ("hparams", "learning_rate", "initial"),
            1e-4,
            "learning_rate.initial: was 0.0, is 0.0001",
        ),
        (("data", "eod_mask_loss"), True, "data.eod_mask_loss: was False, is True"),
    ],
)
def test_what_matters_is_refused_by_name(run, data, path, value, line):
    check(run, data)
    settings = parameters()
    part = settings
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(RunError, match=line):
        check(run, data, settings)


def test_changed_data_are_refused_by_the_shards_names(run, tmp_path):
    data = write_data(tmp_path / "data")
    check(run, data)
    manifest = data / "megatron_phase1.manifest.parquet"
    write_phase(data, [random_shard(1, 0), random_shard(1, 7)], 1)
    index = data / "megatron_phase1.index.json"
    write_json(index, read_json(index) | {"digest": "another"})
    assert manifest.exists()
    with pytest.raises(RunError, match="begun on other data; these shards differ: part-00001"):
        check(run, data)


def test_another_tokenizer_is_refused(run, data, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data, other)
    (other / "tokenizer" / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(RunError, match=r"made with another tokenizer\.json"):
        check(run, other)


def test_checkpoints_without_a_record_are_not_taken_over(run):
    (run.checkpoints / "iter_0000010").mkdir()
    with pytest.raises(RunError, match="which says what they are, is missing"):
        read_record(run)
