import os
import subprocess

import pytest

from scripts.common.files import HOST
from scripts.release.folders import replacing_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole(tmp_path):
    with replacing_folder(tmp_path / "a" / "model") as folder:
        (folder / "weights").write_text("1")
        assert not (tmp_path / "a" / "model").exists()
    assert names(tmp_path / "a") == ["model"]
    assert names(tmp_path / "a" / "model") == ["weights"]


def test_a_folder_is_replaced_and_nothing_of_it_stays(tmp_path):
    for name in ("old", "new"):
        with replacing_folder(tmp_path / "model") as folder:
            (folder / name).write_text("1")
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["new"]


def test_an_error_leaves_the_folder_as_it_was(tmp_path):
    with replacing_folder(tmp_path / "model") as folder:
        (folder / "old").write_text("1")
    with pytest.raises(OSError, match="full"), replacing_folder(tmp_path / "model") as folder:
        (folder / "new").write_text("1")
        raise OSError("the disk is full")
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["old"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive, elsewhere = f"{HOST}-{os.getppid()}", f"another-{dead.pid}"
    for process in (f"{HOST}-{dead.pid}", alive, elsewhere):
        (tmp_path / f"model.partial-{process}").mkdir()
    with replacing_folder(tmp_path / "model"):
        pass
    assert names(tmp_path) == sorted(
        ["model", f"model.partial-{alive}", f"model.partial-{elsewhere}"]
    )
