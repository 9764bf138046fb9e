import multiprocessing

import pytest

from scripts.common.files import HOST, replacing


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
