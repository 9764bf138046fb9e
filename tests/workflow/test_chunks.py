"""Several shards in one job (runtime.shards_per_job), with the real snakemake."""

import os
import re
from pathlib import Path

from tests.workflow.conftest import Checkout

SETTINGS = ("--config", "phases=2", "runtime={shards_per_job: 2}")
CONVERTED = "smoke/data/converted"
MANIFESTS = [f"{CONVERTED}/megatron_phase{phase}.manifest.parquet" for phase in (1, 2)]


def overwrite(path: Path, content: bytes) -> None:
    """Changes a file and keeps its time stamp, which the smoke run's tokenizer looks at."""
    time = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(time, time))


def test_a_chunk_is_what_is_missing_and_a_bad_file_harms_no_other(converted: Checkout) -> None:
    shards = sorted((converted.path / CONVERTED).glob("megatron_phase*/*.bin"))
    contents = [path.read_bytes() for path in shards]
    for path in shards[:3]:  # the third is of the second phase, whose other shard stays
        path.unlink()
    parquet = converted.path / "smoke/data/parquet/phase1/part-00000.parquet"
    whole = parquet.read_bytes()
    overwrite(parquet, whole[:-100])
    output = converted.smoke("converted_all", *SETTINGS, "--keep-going", succeeds=False)
    assert "part-00000.parquet" in output
    assert [path.exists() for path in shards] == [False, True, True, True]
    overwrite(parquet, whole)
    planned = converted.planned(*MANIFESTS, *SETTINGS)
    assert planned == {"convert_chunk": 1, "phase_manifest": 2}
    converted.smoke(*MANIFESTS, *SETTINGS)
    assert [path.read_bytes() for path in shards] == contents
    assert converted.planned(*MANIFESTS, "--config", "phases=2") == {}


def test_a_chunk_that_is_started_again_converts_what_is_left(converted: Checkout) -> None:
    shard = "phase1_part-00001_text_document.bin"
    (converted.path / CONVERTED / "megatron_phase1" / shard).unlink()
    chunk = "smoke/artifacts/converted_chunks/phase1/part-00000/part-00001"
    output = converted.smoke(chunk, *SETTINGS, "-n", "--printshellcmds", "--quiet", "host")
    inputs = re.search(r"--input (.*) --output-dir", output)[1]
    assert inputs == "smoke/data/parquet/phase1/part-00001.parquet"
