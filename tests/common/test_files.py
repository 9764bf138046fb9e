import fcntl
import multiprocessing

import pytest

from scripts.common.files import HOST, locked, replacing


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "marker.json"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["marker.json"]
    assert path.read_text() == "new"


def test_an_error_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "marker.json"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert [file.name for file in tmp_path.iterdir()] == ["marker.json"]
    assert path.read_text() == "old"


def test_what_a_dead_process_left_is_removed_unless_it_is_another_machines(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    abandoned = tmp_path / f"marker.json.partial-{HOST}-{process.pid}"
    elsewhere = tmp_path / f"marker.json.partial-other{HOST}-{process.pid}"
    for file in (abandoned, elsewhere):
        file.write_text("half")
    with replacing(tmp_path / "marker.json") as partial:
        partial.write_text("new")
    assert {file.name for file in tmp_path.iterdir()} == {"marker.json", elsewhere.name}


def test_a_lock_has_one_holder_and_ends_with_its_block(tmp_path):
    path = tmp_path / "download.partial"
    with locked(path, "busy") as file:
        file.write(b"half")
        with pytest.raises(BlockingIOError, match="busy"), locked(path, "busy"):
            pass
    with locked(path, "busy") as file:
        assert file.tell() == 4


def test_a_file_that_its_holder_renamed_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    path = tmp_path / "download.partial"
    monkeypatch.setattr(fcntl, "flock", lambda *_: path.rename(tmp_path / "download"))
    with pytest.raises(BlockingIOError, match="busy"), locked(path, "busy"):
        pass
