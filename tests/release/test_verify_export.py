import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.release import verify_export
from scripts.release.architecture import Architecture
from scripts.release.checkpoint import Checkpoint


@pytest.fixture
def verify(model_file, tokenizer_folder):
    def run(checkpoint, folder, model=model_file):
        return verify_export.verify(
            Checkpoint(checkpoint), Architecture.read(model), tokenizer_folder, folder
        )

    return run


def doctored(exported, destination, change):
    """A copy of the export with changed weights and, as a forger would, a corrected digest."""
    shutil.copytree(exported, destination)
    file = destination / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    provenance = json.loads((destination / "export.json").read_text())
    provenance["files"][file.name] = verify_export.sha256(file)
    (destination / "export.json").write_text(json.dumps(provenance))
    return destination


def test_a_faithful_export_passes(checkpoint, exported, verify):
    verdict = verify(checkpoint, exported)
    assert verdict["passed"] and all(verdict["checks"].values())
    assert verdict["max_abs_error"] < 1e-4 and verdict["argmax_agreement"] == 1
    lengths = {text["name"]: text["tokens"] for text in verdict["texts"]}
    assert lengths["full context"] == 128


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_rounded_export_passes(checkpoint, run_export, verify, dtype):
    verdict = verify(checkpoint, run_export(checkpoint, "--dtype", dtype))
    assert verdict["passed"] and verdict["export_dtype"] == dtype


def test_padded_and_tied_models_pass(
    make_checkpoint, run_export, verify, wider_vocabulary, tied_model
):
    padded = make_checkpoint(architecture=wider_vocabulary)
    assert verify(padded, run_export(padded))["passed"]
    architecture, file = tied_model
    tied = make_checkpoint(architecture=architecture)
    assert verify(tied, run_export(tied, model=file), model=file)["passed"]


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("model.layers.0.self_attn.q_norm.weight", "logits"),
        ("model.layers.1.mlp.down_proj.weight", "logits"),
        ("model.layers.1.input_layernorm.weight", "logits"),
        ("model.norm.weight", "logits"),
    ],
)
def test_one_doctored_number_fails(checkpoint, exported, verify, tmp_path, name, check):
    def change(weights):
        weights[name].view(-1)[0] += 0.05

    verdict = verify(checkpoint, doctored(exported, tmp_path / "model", change))
    assert not verdict["passed"] and not verdict["checks"][check]


def test_a_doctored_row_that_no_text_uses_fails(checkpoint, exported, verify, tmp_path):
    def change(weights):
        weights["model.embed_tokens.weight"][4095, 0] += 1e-6

    verdict = verify(checkpoint, doctored(exported, tmp_path / "model", change))
    assert [name for name, passed in verdict["checks"].items() if not passed] == ["vocabulary_rows"]


def test_swapped_projections_fail(checkpoint, exported, verify, tmp_path):
    def change(weights):
        gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
        weights[gate], weights[up] = weights[up], weights[gate]

    assert not verify(checkpoint, doctored(exported, tmp_path / "model", change))["passed"]


def test_a_not_a_number_fails(checkpoint, exported, verify, tmp_path):
    def change(weights):
        weights["model.norm.weight"][3] = torch.nan

    assert not verify(checkpoint, doctored(exported, tmp_path / "model", change))["passed"]


def test_another_tokenizer_fails(checkpoint, exported, verify, tmp_path):
    folder = doctored(exported, tmp_path / "model", lambda weights: None)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-50]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    checks = verify(checkpoint, folder)["checks"]
    assert not checks["tokenizer"] and not checks["files"]


def test_the_command_writes_a_verdict_and_exits_with_1(
    exported, make_checkpoint, model_file, tokenizer_folder, tmp_path, command_line
):
    """Another checkpoint of the same shape: everything fits but the numbers."""
    another = make_checkpoint(seed=1)
    result = command_line(
        "scripts/release/verify_export.py",
        *("--checkpoint", another, "--model", model_file, "--tokenizer", tokenizer_folder),
        *("--export", exported, "--output", tmp_path / "verdict.json"),
    )
    assert result.returncode == 1
    assert "logits" in result.stderr and "Traceback" not in result.stderr
    assert json.loads((tmp_path / "verdict.json").read_text())["passed"] is False
