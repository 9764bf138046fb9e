"""A checkpoint and a tokenizer that stand for a trained run: random, but nowhere trivial."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from scripts.data import train_smoke_tokenizer
from scripts.release import export, megatron_model
from scripts.release.architecture import Architecture

MODEL = Path("scripts/params/cpu_smoke/model.yaml")
END_OF_DOCUMENT = 597  # of the tokenizer below: 597 tokens, then the special ones


@pytest.fixture(scope="session")
def model_file() -> Path:
    return MODEL


@pytest.fixture(scope="session")
def architecture(model_file):
    return Architecture.read(model_file)


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with megatron_model.one_process():
        yield


def randomize(model, seed):
    """Weights large enough for every part to matter: norms away from one, sharp attention."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(1 + 0.3 * noise if "layernorm" in name else 0.15 * noise)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory, architecture):
    """Returns a function (seed, iteration) → folder iter_XXXXXXX, as Megatron writes it."""

    def make(seed=0, iteration=100, dtype=torch.float32, architecture=architecture):
        folder = tmp_path_factory.mktemp("run") / f"iter_{iteration:07d}"
        folder.mkdir()
        with megatron_model.one_process():
            model = megatron_model.build(architecture, dtype)
            randomize(model, seed)
            megatron_model.save(model, folder, iteration=iteration)
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A small byte-level BPE of Qwen2's kind."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text = Path(torch.__file__).read_text(encoding="utf-8")
    train_smoke_tokenizer.save(train_smoke_tokenizer.train([text], 600), folder)
    return folder


@pytest.fixture(scope="session")
def run_export(model_file, tokenizer_folder, tmp_path_factory):
    """Returns a function (checkpoint, more arguments …) → exported folder."""

    def run(checkpoint, *more, model=model_file, output=None):
        output = output or tmp_path_factory.mktemp("hf") / "model"
        arguments = ["--checkpoint", checkpoint, "--model", model]
        arguments += ["--tokenizer", tokenizer_folder, "--output", output, *more]
        export.main([str(argument) for argument in arguments])
        return output

    return run


@pytest.fixture(scope="session")
def exported(checkpoint, run_export):
    return run_export(checkpoint)


@pytest.fixture
def changed_model(model_file, tmp_path):
    """Returns a function (setting=value …) → model.yaml with these settings."""

    def change(**settings):
        file = tmp_path / "model.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(model_file.read_text()) | settings))
        return file

    return change


@pytest.fixture
def wider_vocabulary(architecture):
    """The same model with rows that only pad the vocabulary, as another parallel size gives."""
    return dataclasses.replace(architecture, vocab_size=4224)


@pytest.fixture
def tied_model(changed_model):
    file = changed_model(untie_embeddings_and_output_weights=False)
    return Architecture.read(file), file


@pytest.fixture(scope="session")
def command_line():
    """Returns a function that runs a script as a user would."""

    def run(script, *arguments):
        return subprocess.run(
            [sys.executable, script, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        )

    return run
