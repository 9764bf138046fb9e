"""What preflight finds wrong, and what it advises."""

import json
import shutil
import subprocess
import sys

import pytest

from scripts.common.settings import PARAMETERS, ROOT
from scripts.train import preflight
from scripts.train.preflight import Finding

MODEL = PARAMETERS / "cpu_smoke" / "model.yaml"


def wrong(findings):
    return {finding.what: finding for finding in findings if finding.remedy}


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = {chr(97 + number): number for number in range(26)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return tmp_path


def test_a_finding_that_is_wrong_says_what_to_do():
    line, advice = str(Finding("disk", "2 GB free", "make room")).splitlines()
    assert line.split() == ["wrong", "disk", "2", "GB", "free"]
    assert advice.strip() == "-> make room"


def test_installed_packages_are_compared_with_the_pinned_ones(tmp_path, monkeypatch):
    pinned = preflight.REQUIREMENTS.read_text().splitlines()
    lines = ["numpy==0.1" if line.startswith("numpy==") else line for line in pinned]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    monkeypatch.setattr(preflight, "REQUIREMENTS", tmp_path / "requirements.txt")
    values = {finding.what: finding.value for finding in preflight.versions()}
    assert values["numpy"].endswith("(pinned: 0.1)")
    assert "pinned" not in values["pyarrow"]


def test_a_tokenizer_larger_than_the_model_is_wrong(tokenizer):
    assert not wrong(preflight.tokenizer(tokenizer, 26))
    assert "padded_vocab_size" in wrong(preflight.tokenizer(tokenizer, 25))["tokenizer"].remedy


def test_a_missing_tokenizer_is_wrong(tmp_path):
    assert "snakemake" in wrong(preflight.tokenizer(tmp_path, 26))["tokenizer"].remedy


def test_a_disk_without_room_for_checkpoints_is_wrong(tmp_path, monkeypatch):
    assert not wrong(preflight.disk(tmp_path, 1 << 20))
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**6)
    )
    assert "more room" in wrong(preflight.disk(tmp_path, 1 << 20))["disk"].remedy
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "write_speed", lambda file, size: 1000.0)
    assert "disk speed" in wrong(preflight.disk(tmp_path, 10**6))


def test_too_few_gpus_are_wrong():
    assert "CUDA_VISIBLE_DEVICES" in wrong(preflight.gpus(1000))["GPUs"].remedy


def test_ranks_measure_the_network_between_them(tokenizer, tmp_path):
    flags = {"model": MODEL, "tokenizer": tokenizer, "artifacts": tmp_path / "artifacts"}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    result = subprocess.run(
        [sys.executable, "-m", "scripts.train.preflight", *words, "--gpus=0", "--cpu-ranks=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "GB/s over 2 ranks" in result.stdout
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["checkpoints"]
