import json

import numpy as np
import pytest
import torch

from scripts.release import average, megatron_model, verify_export
from scripts.release.checkpoint import Checkpoint, write
from scripts.train.checkpoints import TRACKER

ITERATIONS = (100, 200, 300, 400)


@pytest.fixture(scope="module")
def run(make_checkpoint, tmp_path_factory):
    """A run of four checkpoints in bfloat16, and their iterations."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    for iteration in ITERATIONS:
        checkpoint = make_checkpoint(iteration, iteration, torch.bfloat16)
        checkpoint.rename(folder / checkpoint.name)
    (folder / TRACKER).write_text("400")
    return folder


def weights(folder):
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.read(name).double().numpy() for name in checkpoint.tensors}


def averaged(run, tmp_path, *arguments):
    output = tmp_path / "average"
    average.main(["--run", str(run), *arguments, "--output", str(output)])
    return output


def test_it_is_numpys_mean_in_fp32(run, tmp_path):
    output = averaged(run, tmp_path, "--last", "3")
    checkpoint = Checkpoint(output)
    assert checkpoint.folder == output / "iter_0000400"
    assert checkpoint.dtype == torch.float32
    expected = [weights(run / f"iter_{iteration:07d}") for iteration in (200, 300, 400)]
    for name, tensor in weights(output).items():
        mean = np.mean([tensors[name] for tensors in expected], axis=0)
        np.testing.assert_allclose(tensor, mean, rtol=1e-6, atol=1e-7)


def test_megatron_loads_it_like_its_own(run, tmp_path, architecture):
    output = averaged(run, tmp_path, "--last", "2")
    model = megatron_model.build(architecture)
    megatron_model.load(model, Checkpoint(output).folder)
    expected = weights(output)
    np.testing.assert_array_equal(
        model.decoder.layers[1].mlp.linear_fc1.weight.detach(),
        expected["decoder.layers.mlp.linear_fc1.weight"][1],
    )


def test_it_exports_and_verifies(run, tmp_path, run_export, architecture, tokenizer_folder):
    output = averaged(run, tmp_path, "--last", "4", "--every", "100")
    exported = run_export(output, "--dtype", "bfloat16")
    provenance = json.loads((exported / "export.json").read_text())
    assert provenance["averaged"] == [100, 200, 300, 400]
    verdict = verify_export.verify(Checkpoint(output), architecture, tokenizer_folder, exported)
    assert verdict["passed"]


def test_the_rule_counts_back_from_the_tracker(run):
    def chosen(last, every):
        return [int(folder.name[5:]) for folder in average.choose(run, last, every)]

    assert chosen(2, None) == [300, 400]
    assert chosen(2, 200) == [200, 400]
    assert chosen(4, 100) == [100, 200, 300, 400]


@pytest.mark.parametrize("arguments", [("--last", "3", "--every", "150"), ("--last", "5")])
def test_missing_checkpoints_are_named(run, tmp_path, arguments):
    with pytest.raises(SystemExit, match=r"lacks .* it has 100, 200, 300, 400"):
        averaged(run, tmp_path, *arguments)
    assert not (tmp_path / "average").exists()


def test_different_models_are_refused(run, make_checkpoint, wider_vocabulary, tmp_path):
    another = make_checkpoint(architecture=wider_vocabulary)
    with pytest.raises(SystemExit, match="different models"):
        average.main(
            ["--checkpoints", str(run / "iter_0000100"), str(another), "--output", str(tmp_path)]
        )


def test_what_is_written_is_what_is_read(tmp_path, checkpoint):
    source = Checkpoint(checkpoint)
    tensors = {name: source.read(name) for name in source.tensors}
    write(tmp_path, tensors, num_layers=2, common_state=source.common_state)
    copy = Checkpoint(tmp_path)
    assert copy.common_state == source.common_state
    assert all(torch.equal(copy.read(name), tensor) for name, tensor in tensors.items())
