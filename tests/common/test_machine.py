import importlib.util
import types
from pathlib import Path

import pytest

from scripts.common.machine import MachineError, check_megatron, check_python

ROOT = Path(__file__).resolve().parents[2]


def megatron(folder, minor):
    facts = folder / "megatron" / "core" / "package_info.py"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")


def test_another_python_is_refused_with_the_way_out():
    with pytest.raises(MachineError, match="activate"):
        check_python((3, 11, 4))
    check_python((3, 12, 0))


def test_an_old_submodule_is_refused_with_the_way_out(tmp_path):
    megatron(tmp_path, 18)
    with pytest.raises(MachineError, match=r"version 0\.18, .*git submodule update"):
        check_megatron(tmp_path)


def test_the_pinned_submodule_and_an_empty_folder_are_right(tmp_path):
    check_megatron(tmp_path)
    megatron(tmp_path, 19)
    check_megatron(tmp_path)


@pytest.fixture
def make_venv():
    specification = importlib.util.spec_from_file_location("make_venv", ROOT / "envs/make_venv.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_no_environment_is_made_on_a_full_disk(make_venv, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1_500_000_000))
    with pytest.raises(SystemExit, match=r"has 1\.5 GB free, the packages take 8 GB"):
        make_venv.check_disk(tmp_path)


def test_no_environment_is_made_in_a_read_only_checkout(make_venv, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SystemExit, match="cannot be written to"):
        make_venv.check_disk(tmp_path)


def test_no_environment_is_made_with_another_python(make_venv, monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 9, 1))
    with pytest.raises(SystemExit, match=r"Python 3\.12 is needed"):
        make_venv.check_python()
