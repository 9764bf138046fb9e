"""Megatron's own parser understands the command line, and takes from it what was meant."""

import argparse

import pytest

from scripts.common.files import write_json
from scripts.common.settings import load_parameters, phase_recipe
from scripts.train.arguments import chosen_layers, flags, megatron_arguments
from scripts.train.phases import MASKS, Plan
from scripts.train.run import Run, RunError

RUNTIME = {"micro_batch_size": 2, "checkpoint_interval": 400, "nodes": 1}


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def plan(**changes):
    values = dict.fromkeys(Plan.__dataclass_fields__) | {
        "last_iteration": 300,
        "transitions": [100, 200],
        "validation_iterations": 2,
        "masks": dict.fromkeys(MASKS, False),
    }
    return Plan(**values | changes)


def parse(parser, tmp_path, model, runtime, **changes):
    recipe = phase_recipe(load_parameters(model), 1)
    arguments = megatron_arguments(recipe, RUNTIME | runtime, plan(**changes), Run("r", tmp_path))
    return parser.parse_args(arguments)


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("model", ["qwen3_1p7b", "gpt_smoke", "cpu_smoke"])
def test_every_argument_is_megatrons(parser, tmp_path, model, gpus):
    args = parse(parser, tmp_path, model, {"gpus": gpus})
    parameters = load_parameters(model)
    for name, value in (parameters["model"] | parameters["hparams"]["optimizer"]).items():
        action = parser._option_string_actions["--" + name.replace("_", "-")]
        assert getattr(args, action.dest) == (action.const if value is True else value)
    assert args.seq_length == parameters["hparams"]["sequence_length"]
    assert args.train_samples == 300 * parameters["hparams"]["global_batch_size"]
    assert args.phase_transition_iterations == "100,200"
    assert args.dist_ckpt_strictness == "raise_all"
    assert args.verify_integrity
    assert args.exit_signal_handler
    assert (args.attention_dropout, args.hidden_dropout) == (0, 0)


@pytest.mark.parametrize(("then", "now"), [("2.20.2", None), (None, object())])
def test_the_optimizer_stays_sharded_or_whole_as_the_run_began(
    parser, tmp_path, monkeypatch, then, now
):
    runtime = {"gpus": 8, "layers": "local"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: now)
    assert parse(parser, tmp_path, "gpt_smoke", runtime).use_distributed_optimizer == bool(now)
    record = {"phases": {"1": {"environment": {"transformer-engine": then}}}}
    write_json(Run("r", tmp_path).record, record)
    assert parse(parser, tmp_path, "gpt_smoke", runtime).use_distributed_optimizer == bool(then)


def test_extra_arguments_come_last_and_win(parser, tmp_path, monkeypatch):
    monkeypatch.setenv("EXTRA_ARGS", "--log-interval 7 --log-params-norm")
    runtime = {"gpus": 0, "extra_arguments": "--log-interval 5 --num-workers 3"}
    args = parse(parser, tmp_path, "cpu_smoke", runtime)
    assert (args.log_interval, args.num_workers, args.log_params_norm) == (7, 3, True)


def test_iterations_to_skip_reach_megatron(parser, tmp_path):
    args = parse(parser, tmp_path, "cpu_smoke", {"gpus": 0, "skip_iterations": [7, 12]})
    assert args.iterations_to_skip == [7, 12]


def test_a_full_mask_is_made_only_where_documents_are_separated(parser, tmp_path):
    args = parse(parser, tmp_path, "cpu_smoke", {"gpus": 0})
    assert not args.create_attention_mask_in_dataloader
    masks = dict.fromkeys(MASKS, False) | {"reset_position_ids": True, "reset_attention_mask": True}
    args = parse(parser, tmp_path, "cpu_smoke", {"gpus": 0}, masks=masks)
    assert args.create_attention_mask_in_dataloader
    assert args.reset_attention_mask
    assert args.reset_position_ids


@pytest.mark.parametrize(
    ("masks", "runtime", "message"),
    [
        ("reset_attention_mask", {"layers": "fast"}, "set runtime.layers to local"),
        ("dataloader_inter_document_masking", {"layers": "local"}, "set runtime.layers to fast"),
        ("dataloader_inter_document_masking", {"pipeline_parallel": 2}, "pipeline_parallel: set"),
        ("reset_attention_mask dataloader_inter_document_masking", {}, "set one of them to false"),
    ],
)
def test_masks_that_the_layers_would_not_obey_are_refused(tmp_path, masks, runtime, message):
    masks = {name: name in masks.split() for name in MASKS}
    with pytest.raises(RunError, match=message):
        chosen_layers({"gpus": 0} | runtime, plan(masks=masks))


def test_flags():
    assert flags({"a_b": 1, "c": True, "d": False, "e": None, "f": [2, 3], "g": []}) == [
        *("--a-b", "1"),
        "--c",
        *("--f", "2", "3"),
    ]
