"""Download, convert, drop: from a hub on this machine, interrupted at random, complete at last."""

import os
import random
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from scripts.data import convert_phase_to_megatron, train_smoke_tokenizer
from tests.data.hub_server import Hub
from tests.workflow.conftest import Checkout, fresh_checkout

DOCUMENTS = 6  # of each Parquet file


def write_corpus(folder: Path, files: int) -> list[Path]:
    """Writes Parquet files of Python's own sources, which are on every machine."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace")[:20_000] for path in modules]
    folder.mkdir()
    paths = [folder / f"part-{number:05d}.parquet" for number in range(files)]
    for number, path in enumerate(paths):
        rows = [f"{number}\n{texts[(number + i) % len(texts)]}" for i in range(DOCUMENTS)]
        pq.write_table(pa.table({"text": rows}), path)
    return paths


class Cycle:
    """A checkout that takes its data from a hub, and what conversion makes of the same files."""

    def __init__(self, folder: Path, files: int, shards_per_job: int = 1) -> None:
        self.sources = write_corpus(folder / "corpus", files)
        self.checkout = fresh_checkout(folder / "checkout")
        tokenizer = self.checkout.path / "data/tokenizer"
        inputs = [str(path) for path in self.sources[:5]]
        train_smoke_tokenizer.main(
            ["--input", *inputs, "--vocab-size", "1024", "--output-dir", str(tokenizer)]
        )
        self.reference = folder / "reference"
        options = ["--output-prefix-prefix", "phase1", "--tokenizer-model", str(tokenizer)]
        inputs = [str(path) for path in self.sources]
        convert_phase_to_megatron.main(
            ["--input", *inputs, "--output-dir", str(self.reference), *options]
        )
        settings = yaml.safe_load((self.checkout.path / "config.yaml").read_text())
        settings |= {"model": "cpu_smoke", "phases": 1}
        settings["recipe"] |= {"source": "hub"}
        settings["hub"] |= {"dataset": "owner/corpus"}
        settings["runtime"] |= {"gpus": 0, "keep_parquet": False, "convert_threads": 1}
        settings["runtime"] |= {"shards_per_job": shards_per_job}
        (self.checkout.path / "config.yaml").write_text(yaml.safe_dump(settings))

    def converted(self) -> int:
        """Counts the shards that are there."""
        return len(list((self.checkout.path / "data/converted").glob("megatron_phase1/*.idx")))

    def interrupt(self, number: signal.Signals, shards: int, seconds: float) -> None:
        """Runs the conversion until some more shards are there and a while longer; stops it."""
        wanted = self.converted() + shards
        with subprocess.Popen(
            self.checkout.command("converted_all"),
            cwd=self.checkout.path,
            env=self.checkout.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            while self.converted() < wanted:
                assert process.poll() is None
                time.sleep(0.02)
            time.sleep(seconds)
            os.killpg(process.pid, number)
        assert process.returncode != 0
        self.checkout.run("--unlock", "converted_all")

    def assert_complete_and_exact(self) -> None:
        """Compares each shard with the reference; no Parquet file and no litter may be left."""
        converted = self.checkout.path / "data/converted/megatron_phase1"
        names = {path.name for path in self.reference.iterdir()}
        assert {path.name for path in converted.iterdir()} == names
        for name in names:
            if not name.endswith(".json"):
                assert (converted / name).read_bytes() == (self.reference / name).read_bytes()
        assert [path.name for path in (self.checkout.path / "data/parquet").rglob("part*")] == []


def run_cycle(
    folder: Path, monkeypatch, files: int, interruptions: int, seed: int, shards_per_job: int = 1
) -> None:
    """Converts a corpus from the hub with interruptions and compares what comes of it."""
    chance = random.Random(seed)
    cycle = Cycle(folder, files, shards_per_job)
    content = {f"phase1/{path.name}": path.read_bytes() for path in cycle.sources}
    with Hub(content) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        cycle.checkout.run("manifest_all")
        most = files // (interruptions + 1)  # shards until an interruption
        for _ in range(interruptions):
            hub.fail("GET /cdn", cut_after=chance.randrange(20_000))
            hub.fail("GET /cdn", status=503)
            number = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            cycle.interrupt(number, chance.randint(0, most - 1), chance.uniform(0, 1))
        cycle.checkout.run("converted_all")
        cycle.assert_complete_and_exact()
        requests = len(hub.requests)
        cycle.checkout.run("converted_all")
        assert len(hub.requests) == requests


def test_an_interrupted_download_and_conversion_ends_complete_and_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cycle(tmp_path, monkeypatch, files=6, interruptions=2, seed=1)


def test_chunks_are_downloaded_converted_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cycle(tmp_path, monkeypatch, files=5, interruptions=1, seed=2, shards_per_job=3)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cycle of two files whose source table is made, and its hub."""
    cycle = Cycle(tmp_path, 2)
    with Hub({f"phase1/{path.name}": path.read_bytes() for path in cycle.sources}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        cycle.checkout.run("manifest_phase1")
        yield cycle.checkout, hub


def test_downloads_are_targets_kept_and_repaired(served: tuple[Checkout, Hub]) -> None:
    checkout, hub = served
    keep = ("--config", "runtime={keep_parquet: true}")
    parquet = checkout.path / "data/parquet/phase1/part-00001.parquet"
    assert "keep_parquet is false" in checkout.run("download_all", succeeds=False)
    checkout.run("download_all", *keep)
    assert parquet.read_bytes() == hub.files["phase1/part-00001.parquet"]
    os.truncate(parquet, 10)
    checkout.run("converted_all", *keep)
    assert parquet.read_bytes() == hub.files["phase1/part-00001.parquet"]
    assert len(list(parquet.parent.glob("*.parquet"))) == 2


def test_a_changed_upstream_stops_nothing_and_is_reported(served: tuple[Checkout, Hub]) -> None:
    checkout, hub = served
    hub.revisions["main"] = "beef" + "0" * 36
    hub.revisions["old"] = "c0ffee" + "0" * 34
    hub.files["phase1/part-00002.parquet"] = b"new"
    output = checkout.run("manifest_phase1", succeeds=False)
    assert "1 new: part-00002.parquet" in output
    checkout.run("converted_all")
    converted = checkout.path / "data/converted/megatron_phase1"
    assert len(list(converted.glob("*.idx"))) == 2
