"""The launcher on GPUs: pytest -m gpu tests/train/test_gpu.py."""

import shlex
import time
from dataclasses import replace

import pytest

from scripts.train.arguments import SHARDED_OPTIMIZER_ARGUMENTS
from tests.train.small_run import ITERATIONS, SmallRun

pytestmark = pytest.mark.gpu

MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
}


@pytest.fixture
def run(data, tmp_path):
    torch = pytest.importorskip("torch")
    result = SmallRun(data, tmp_path)
    result.parameters["model"] |= MODEL
    result.parameters["hparams"]["precision"] = "bf16"
    gpus = max(count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count())
    result.runtime |= {"gpus": gpus, "micro_batch_size": 1}
    return result


@pytest.mark.parametrize("optimizer", [[], SHARDED_OPTIMIZER_ARGUMENTS], ids=["whole", "sharded"])
def test_a_stopped_training_resumes_and_ends_its_phases(run, optimizer):
    run.runtime["extra_arguments"] = shlex.join(optimizer)
    reached = run.stop_after(1)
    code, output = run.launch(1)
    assert code == 0, output
    assert f"going on after {reached}" in output
    code, output = run.launch(2)
    assert code == 0, output
    steps = run.steps()
    assert sorted(steps) == list(range(1, sum(ITERATIONS) + 1))
    assert steps[sum(ITERATIONS)][0] < steps[1][0] - 0.5


def test_other_numbers_of_gpus_go_on_with_the_same_losses(run, data, tmp_path):
    gpus = run.runtime["gpus"]
    if gpus < 2:
        pytest.skip("needs two GPUs")
    whole = replace(run, artifacts=tmp_path / "whole")
    for phase in (1, 2):
        code, output = whole.launch(phase)
        assert code == 0, output
    for count, step in ((gpus, 3), (gpus // 2, 8), (1, 13)):
        run.runtime["gpus"] = count
        run.stop_after(step)
    run.runtime["gpus"] = gpus
    for phase in (1, 2):
        code, output = run.launch(phase)
        assert code == 0, output
    assert run.losses() == pytest.approx(whole.losses(), rel=0.02)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("rank", "step"),
        ("rank", "save"),
        ("reader", "step"),
        ("writer", "step"),
        ("writer", "save"),
    ],
)
def test_a_killed_process_ends_the_launch_and_the_next_one_goes_on(run, victim, moment):
    process = run.start(1)
    run.wait_for_step(4, process)
    if moment == "save":
        while not (run.run.checkpoints / "iter_0000006").exists():
            time.sleep(0.001)
    output = run.kill(victim, process)
    assert process.returncode == 1, output
    code, output = run.launch(1)
    assert code == 0, output
    assert sorted(run.steps()) == list(range(1, ITERATIONS[0] + 1))


def test_a_save_that_fails_ends_the_launch_and_the_next_one_goes_on(run):
    process = run.start(1)
    run.wait_for_step(4, process)
    output = run.fill_disk(process)
    assert process.returncode == 1, output
    code, output = run.launch(1)
    assert code == 0, output
    assert sorted(run.steps()) == list(range(1, ITERATIONS[0] + 1))


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
def test_other_layers_go_on_with_the_same_run(run, layers):
    if layers == "transformer_engine":
        pytest.importorskip("transformer_engine")
    first, second = ITERATIONS
    for phase, chosen in ((1, "fast"), (2, layers)):
        run.runtime["layers"] = chosen
        code, output = run.launch(phase)
        assert code == 0, output
        assert f"layers: {chosen} (requested)" in output
    losses = run.losses()
    assert sorted(losses) == list(range(1, first + second + 1))
    assert abs(losses[first + 1] - losses[first]) < 0.2 * (losses[1] - losses[first])
