"""The real huggingface_hub client against a server with the hub's protocol and its faults."""

import os
import subprocess
import sys
import time

import huggingface_hub.constants
import pytest

from scripts.common.files import locked
from scripts.data import download_kaiyuan, hub, source_manifest
from scripts.data.hub import HubError, RemoteFile, Repository
from scripts.data.source_table import read_table
from tests.data.hub_server import COMMIT, Hub, git_id, point_at, sha256

CONTENT = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "README.md": b"card",
    **{f"phase1/part-{number:05d}.parquet": CONTENT + bytes([number]) for number in range(5)},
    "phase1/_SUCCESS": b"",
    "phase2/part-00000.parquet": b"two",
}
NAME = "part-00002.parquet"


@pytest.fixture
def server(monkeypatch):
    with Hub(FILES) as server:
        point_at(server.url, monkeypatch)
        yield server


@pytest.fixture
def parquet(tmp_path):
    return tmp_path / "parquet"


def manifest(parquet, *options, phase="1"):
    source_manifest.main(
        ["--phase", phase, "--parquet", str(parquet), "--repository", "owner/corpus", *options]
    )


def download(parquet, *names):
    download_kaiyuan.main(["--phase", "1", "--parquet", str(parquet), *names])


@pytest.fixture
def listed(server, parquet):
    """The server with phase 1 in a source table."""
    manifest(parquet)
    server.requests.clear()
    return server


def fetched(parquet):
    return (parquet / "phase1" / NAME).read_bytes() == FILES[f"phase1/{NAME}"]


def leftovers(parquet):
    return [path.name for path in (parquet / "phase1").glob("*") if path.suffix != ".parquet"]


def test_the_table_lists_the_hubs_sizes_and_digests_page_by_page(server, parquet):
    server.page = 2
    manifest(parquet)
    table = read_table(parquet / "phase1.files.tsv")
    assert table.origin["commit"] == COMMIT
    assert {name: (file.bytes, file.sha256) for name, file in table.files.items()} == {
        path.removeprefix("phase1/"): (len(content), sha256(content))
        for path, content in FILES.items()
        if path.startswith("phase1/part")
    }


def test_a_changed_upstream_is_reported_and_not_followed(listed, parquet):
    before = (parquet / "phase1.files.tsv").read_bytes()
    manifest(parquet)
    listed.files[f"phase1/{NAME}"] = b"changed"
    listed.files["phase1/part-00009.parquet"] = b"new"
    del listed.files["phase1/part-00000.parquet"]
    listed.revisions["main"] = "beef" + "0" * 36
    with pytest.raises(SystemExit) as stop:
        manifest(parquet)
    for text in ("1 new: part-00009", "1 gone: part-00000", f"1 changed: {NAME}", "--update"):
        assert text in str(stop.value)
    assert (parquet / "phase1.files.tsv").read_bytes() == before
    manifest(parquet, "--update")
    assert "part-00009.parquet" in read_table(parquet / "phase1.files.tsv").files


@pytest.mark.parametrize(
    ("options", "phase", "message"),
    [
        (["--revision", "renamed"], "1", "no revision 'renamed'"),
        ([], "3", "phase3 does not exist"),
        (["--folder", "data/phase{phase}"], "1", "data/phase1 does not exist"),
        (["--repository", "owner/other"], "1", "no dataset repository owner/other"),
    ],
)
def test_what_the_hub_does_not_have_is_said_in_a_sentence(server, parquet, options, phase, message):
    with pytest.raises(SystemExit, match=message):
        manifest(parquet, *options, phase=phase)
    assert not parquet.exists()


def test_a_file_arrives_whole_and_alone(listed, parquet):
    download(parquet, NAME)
    assert fetched(parquet)
    assert list((parquet / "phase1").iterdir()) == [parquet / "phase1" / NAME]


def test_without_names_all_files_arrive_and_are_not_fetched_again(listed, parquet):
    download(parquet)
    assert len(listed.ranges()) == 5
    download(parquet)
    assert len(listed.ranges()) == 5


def test_a_cut_connection_is_resumed_where_it_broke(listed, parquet):
    listed.fail("GET /cdn", cut_after=300_000)
    listed.fail("GET /cdn", cut_after=100_000)
    download(parquet, NAME)
    assert fetched(parquet)
    starts = listed.ranges()
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] > 0


def test_the_next_process_goes_on_where_the_last_one_stopped(listed, parquet):
    listed.fail("GET /cdn", cut_after=300_000)
    listed.fail("GET /cdn", status=404, times=99)
    with pytest.raises(SystemExit, match="the hub answers 404"):
        download(parquet, NAME)
    assert not (parquet / "phase1" / NAME).exists()
    (partial,) = (parquet / "phase1").iterdir()
    size = partial.stat().st_size
    assert size > 0
    listed.faults.clear()
    listed.requests.clear()
    download(parquet, NAME)
    assert fetched(parquet)
    assert listed.ranges() == [size]
    assert leftovers(parquet) == []


def test_a_torn_partial_file_costs_one_more_download(listed, parquet):
    digest = sha256(FILES[f"phase1/{NAME}"])
    for torn in (b"x" * 1000, CONTENT + b"far too long"):
        partial = parquet / "phase1" / f"{NAME}.{digest[:8]}.partial"
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(torn)
        download(parquet, NAME)
        assert fetched(parquet)
        assert leftovers(parquet) == []
        (parquet / "phase1" / NAME).unlink()


def test_a_server_that_ignores_ranges_is_no_problem(listed, parquet):
    listed.ignore_ranges = True
    listed.fail("GET /cdn", cut_after=300_000)
    download(parquet, NAME)
    assert fetched(parquet)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("request_", ["HEAD /datasets", "GET /cdn", "GET /datasets"])
def test_passing_errors_are_waited_out(listed, parquet, status, request_):
    listed.fail(request_, status=status, times=2, headers={"Retry-After": "1"})
    download(parquet, NAME)
    assert fetched(parquet)


@pytest.mark.parametrize("status", [429, 503])
def test_passing_errors_of_the_listing_are_waited_out(server, parquet, status):
    server.fail("GET /api/.*/revision", status=status, times=2)
    server.fail("GET /api/.*/tree", status=status, times=2)
    manifest(parquet)
    assert len(read_table(parquet / "phase1.files.tsv").files) == 5


@pytest.mark.parametrize("status", [403, 503])
def test_lasting_errors_end_with_a_sentence(listed, parquet, status):
    listed.fail("datasets", status=status, times=999)
    with pytest.raises(SystemExit, match=f"the hub answers {status}"):
        download(parquet, NAME)
    assert not (parquet / "phase1" / NAME).exists()


def test_a_wrong_digest_never_gets_the_final_name(listed, parquet):
    listed.fail("GET /cdn", corrupt=True, times=9)
    with pytest.raises(SystemExit, match="not the content that the hub lists"):
        download(parquet, NAME)
    assert list((parquet / "phase1").iterdir()) == []
    listed.faults.clear()
    download(parquet, NAME)
    assert fetched(parquet)


def test_a_file_that_changed_upstream_is_refused_before_it_is_fetched(listed, parquet):
    listed.files[f"phase1/{NAME}"] = b"something else"
    with pytest.raises(SystemExit, match="has changed"):
        download(parquet, NAME)
    assert listed.ranges() == []


def test_a_file_that_is_gone_upstream_is_named(listed, parquet):
    del listed.files[f"phase1/{NAME}"]
    with pytest.raises(SystemExit, match=f"phase1/{NAME} does not exist"):
        download(parquet, NAME)


def test_damage_under_the_final_name_is_repaired(listed, parquet):
    download(parquet, NAME)
    os.truncate(parquet / "phase1" / NAME, 10)
    download(parquet, NAME)
    assert fetched(parquet)


@pytest.mark.parametrize("intact", [True, False])
def test_files_stored_by_xet_are_fetched_by_xet_and_checked(listed, parquet, monkeypatch, intact):
    listed.xet = True
    content = FILES[f"phase1/{NAME}"]

    def xet_get(incomplete_path, xet_file_data, headers, expected_size):
        assert xet_file_data.file_hash == sha256(content)
        incomplete_path.write_bytes(content if intact else content[1:] + b"x")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(hub, "xet_get", xet_get)
    if intact:
        download(parquet, NAME)
        assert fetched(parquet)
    else:
        with pytest.raises(SystemExit, match="not the content that the hub lists"):
            download(parquet, NAME)
        assert leftovers(parquet) == []
    assert listed.ranges() == []


def test_a_full_disk_is_said_before_anything_is_fetched(listed, parquet, monkeypatch):
    monkeypatch.setattr(hub, "SPARE_BYTES", 1 << 60)
    with pytest.raises(SystemExit, match="free some space"):
        download(parquet, NAME)
    assert listed.requests == []


def test_a_second_process_does_not_write_to_the_same_partial_file(listed, parquet):
    digest = sha256(FILES[f"phase1/{NAME}"])
    (parquet / "phase1").mkdir()
    with (
        locked(parquet / "phase1" / f"{NAME}.{digest[:8]}.partial", "busy"),
        pytest.raises(SystemExit, match="by another process"),
    ):
        download(parquet, NAME)


def test_unknown_names_and_absent_or_local_tables_are_sentences(listed, parquet):
    with pytest.raises(SystemExit, match=r"does not list other\.parquet"):
        download(parquet, "other.parquet")
    (parquet / "phase1.files.tsv").write_text('# {"folder":"x"}\nfile\tbytes\tsha256\n')
    with pytest.raises(SystemExit, match="nothing to download"):
        download(parquet)
    (parquet / "phase1.files.tsv").unlink()
    with pytest.raises(SystemExit, match="manifest_phase1"):
        download(parquet)


def test_an_unreachable_hub_is_a_sentence(parquet, monkeypatch):
    point_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(SystemExit, match="no connection to the hub"):
        manifest(parquet)


def test_small_files_are_checked_by_gits_digest(server, tmp_path):
    file = RemoteFile("README.md", 4, git_id(b"card"))
    assert Repository("owner/corpus", "dataset", "main").files()["README.md"] == file
    Repository("owner/corpus", "dataset", COMMIT).download(file, tmp_path / "card")
    assert (tmp_path / "card").read_bytes() == b"card"
    with pytest.raises(HubError, match="has changed"):
        Repository("owner/corpus", "dataset", COMMIT).download(
            RemoteFile("README.md", 4, "0" * 40), tmp_path / "other"
        )


def test_a_killed_process_leaves_nothing_under_the_final_name(tmp_path):
    content = os.urandom(1 << 20) * 24
    with Hub({"phase1/part-00000.parquet": content}) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "scripts.data.source_manifest", "--phase", "1"]
        options = ["--parquet", str(tmp_path), "--repository", "owner/corpus"]
        subprocess.run([*command, *options], env=environment, check=True)
        command[2] = "scripts.data.download_kaiyuan"
        server.fail("GET /cdn", cut_after=23 << 20)
        server.fail("GET /cdn", status=503, times=999)
        process = subprocess.Popen([*command, *options[:2]], env=environment)
        folder = tmp_path / "phase1"
        while not any(path.stat().st_size for path in folder.glob("*")):
            time.sleep(0.05)
        process.kill()
        process.wait()
        assert not (folder / "part-00000.parquet").exists()
        server.faults.clear()
        subprocess.run([*command, *options[:2]], env=environment, check=True)
        assert (folder / "part-00000.parquet").read_bytes() == content
        assert server.ranges()[-1] > 0


def test_a_local_folder_is_listed_with_digests_only_on_request(tmp_path):
    folder = tmp_path / "phase2"
    folder.mkdir()
    (folder / "b.parquet").write_bytes(b"two")
    (folder / "a.parquet").write_bytes(b"one!")
    options = ["--phase", "2", "--parquet", str(tmp_path)]
    source_manifest.main(options)
    table = read_table(tmp_path / "phase2.files.tsv")
    assert {name: (file.bytes, file.sha256) for name, file in table.files.items()} == {
        "a.parquet": (4, ""),
        "b.parquet": (3, ""),
    }
    source_manifest.main([*options, "--digests", "--update"])
    table = read_table(tmp_path / "phase2.files.tsv")
    assert table.files["b.parquet"].sha256 == sha256(b"two")
    (folder / "b.parquet").write_bytes(b"TWO")
    source_manifest.main(options)
    with pytest.raises(SystemExit, match=r"1 changed: b\.parquet"):
        source_manifest.main([*options, "--digests"])
