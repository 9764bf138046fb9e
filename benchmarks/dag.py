"""What Snakemake itself costs at scale: dry runs and scheduling, this project beside the plain way.

The plain way is what one writes first: a wildcard rule and `expand` over all shards. Both convert
the same files (of a few bytes) and are called as a user calls them. Every measured command is a
process of its own: wall and CPU seconds, peak memory, and for runs the jobs that end a second.

    python benchmarks/dag.py                                  # 1,000, 10,000 and 50,000 shards
    python benchmarks/dag.py --shards 50000 --prefix "taskset -c 0"

States: `done`, all shards finished; `first look`, the same before anything is remembered
(scripts/data/shards.py); `records`, the same with Snakemake's records of a million files, which
take minutes and 4 GB to write and so have to be asked for; `2 % missing`; `cold`, nothing done;
`chunks`, the same with 32 shards a job. `run`, jobs that end a second with all of them ready and
64 cores; the job itself does nothing but write its files.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snakemake.persistence import RECORD_FORMAT_VERSION, MetadataRecord
from snakemake.persistence.file import FilePersistence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.checkout import copy_program  # noqa: E402
from scripts.common.files import sha256  # noqa: E402
from scripts.data.shards import Phase, conversion_recipe  # noqa: E402

PHASES = 5
RECIPE = ("text", "<|endoftext|>", "as_text", "error")
SNAKEMAKE = Path(sys.executable).parent / "snakemake"
RUN_SECONDS = 40
RECORDS = 1_000_000
CHUNKS = ["--config", "runtime={shards_per_job: 32}"]
CONTENT = b"tokens"

PLAIN = """
SHARDS = [f"part-{{number:05d}}" for number in range({shards})]
PREFIX = "data/converted/megatron_phase{{phase}}/phase{{phase}}_{{shard}}_text_document"

rule converted_all:
    input:
        expand(PREFIX + ".bin", phase=range(1, {phases} + 1), shard=SHARDS),
        expand(PREFIX + ".idx", phase=range(1, {phases} + 1), shard=SHARDS),

rule convert:
    input:
        "data/parquet/phase{{phase}}/{{shard}}.parquet",
    output:
        bin=PREFIX + ".bin",
        idx=PREFIX + ".idx",
    log:
        "logs/convert/phase{{phase}}/{{shard}}.log",
    params:
        text_key="text",
        end_of_document="<|endoftext|>",
    shell:
        "echo tokens | tee {{output}} > {{log}}"
"""


# In the place of the converter; its arguments begin with --input FILE… --output-dir FOLDER
# --output-prefix-prefix PREFIX, as rules/common.smk calls it.
CONVERTER = """#!/bin/sh
shift
files=
while [ "$1" != --output-dir ]; do files="$files $1"; shift; done
mkdir -p "$2"
for file in $files; do
    name=${file##*/}
    for part in bin idx json; do
        echo tokens > "$2/$4_${name%.parquet}_text_document.$part"
    done
done
"""


@dataclass(frozen=True)
class Measured:
    """One command: wall seconds, CPU seconds of it and its children, peak memory in MB."""

    wall: float
    cpu: float
    memory: float


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    usual = [state for state in STATES if state != "records"]
    parser.add_argument("--states", nargs="+", choices=STATES, default=usual)
    parser.add_argument("--prefix", default="", help="command before each measured one")
    arguments = parser.parse_args(argv)
    print("| shards | state | way | wall s | CPU s | memory MB | jobs/s |")
    print("|---|---|---|---|---|---|---|")
    for shards in arguments.shards:
        for way in arguments.ways:
            with tempfile.TemporaryDirectory(prefix="dag-") as folder:
                project = WAYS[way](Path(folder), shards // PHASES)
                for state in arguments.states:
                    measure(project, state, way, shards, shlex.split(arguments.prefix))


def measure(folder: Path, state: str, way: str, shards: int, prefix: list[str]) -> None:
    """Brings a project to a state and prints the row of it."""
    if state == "chunks" and way == "plain":
        return
    STATES[state](folder, shards // PHASES)
    if state == "run":
        rate = jobs_per_second(folder, shards, prefix)
        print(f"| {shards:,} | {state} | {way} | | | | {rate:.1f} |", flush=True)
        return
    command = [*prefix, str(SNAKEMAKE), "converted_all", "--dry-run", "--quiet", "rules"]
    cost = run([*command, *CHUNKS] if state == "chunks" else command, folder)
    columns = f"{cost.wall:.1f} | {cost.cpu:.1f} | {cost.memory:.0f}"
    print(f"| {shards:,} | {state} | {way} | {columns} | |", flush=True)


def run(command: list[str], folder: Path) -> Measured:
    """Runs a command to its end."""
    start = time.monotonic()
    with subprocess.Popen(
        [*command, "--cores", "64"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(errors.decode())
    wall = time.monotonic() - start
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def jobs_per_second(folder: Path, shards: int, prefix: list[str]) -> float:
    """Starts the conversion of everything and counts the jobs that end once the first has."""
    command = [*prefix, str(SNAKEMAKE), "converted_all", "--cores", "64", "--quiet", "all"]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            while not finished(folder):
                time.sleep(0.1)
            start, first = time.monotonic(), finished(folder)
            while process.poll() is None and time.monotonic() < start + RUN_SECONDS:
                time.sleep(0.1)
            return (finished(folder) - first) / (time.monotonic() - start)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def finished(folder: Path) -> int:
    """Counts the index files that are there."""
    return sum(1 for _ in (folder / "data/converted").glob("megatron_phase*/*.idx"))


def phases(folder: Path) -> Iterator[Phase]:
    """Yields where the files of each phase lie."""
    for number in range(1, PHASES + 1):
        yield Phase(number, str(folder / "data/parquet"), str(folder / "data/converted"))


def write_sources(folder: Path, shards: int) -> None:
    """Writes small files in the place of Parquet files."""
    for phase in phases(folder):
        Path(phase.raw_folder).mkdir(parents=True)
        for number in range(shards):
            Path(phase.raw(f"part-{number:05d}")).write_bytes(CONTENT)


def plain(folder: Path, shards: int) -> Path:
    """Makes a project of one Snakefile, as one writes it first."""
    write_sources(folder, shards)
    (folder / "Snakefile").write_text(PLAIN.format(shards=shards, phases=PHASES))
    return folder


def ours(folder: Path, shards: int) -> Path:
    """Makes a copy of this project whose conversion only writes its files."""
    copy_program(folder)
    rules = folder / "rules/common.smk"
    program = "python -m scripts.data.convert_phase_to_megatron"
    assert rules.read_text().count(program) == 1
    rules.write_text(rules.read_text().replace(program, "./convert"))
    converter = folder / "convert"
    converter.write_text(CONVERTER)
    converter.chmod(0o755)
    tokenizer = folder / "data/tokenizer"
    tokenizer.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (tokenizer / name).write_text("{}")
    (folder / "data/converted").mkdir()
    (folder / "data/converted/tokenizer.json").write_text("{}")
    write_sources(folder, shards)
    return folder


def convert_all(folder: Path, shards: int) -> None:
    """Writes all shards as the converter would."""
    recipe = conversion_recipe(folder / "data/tokenizer", *RECIPE)
    for phase in phases(folder):
        Path(phase.folder).mkdir(parents=True, exist_ok=True)
        digest = sha256(Path(phase.raw("part-00000")))
        sidecar = {
            "source": {"bytes": len(CONTENT), "sha256": digest},
            "bin": {"bytes": len(CONTENT)},
            "idx": {"bytes": len(CONTENT)},
            "recipe": recipe,
        }
        text = json.dumps(sidecar | {"rest": "x" * 600})  # as long as a real one
        for number in range(shards):
            files = phase.files(f"part-{number:05d}")
            for path in files:
                Path(path).write_text(text if path.endswith(".json") else CONTENT.decode())


def forget(folder: Path, shards: int) -> None:
    """Forgets what was remembered of finished shards."""
    for path in (folder / "data/converted").glob("*.checked.json"):
        path.unlink()


def write_records(folder: Path, shards: int) -> None:
    """Writes Snakemake's records of a million files: all shards', and of others long gone."""
    persistence = FilePersistence(path=folder / ".snakemake")
    names = (f"part-{number:05d}" for number in range(shards))
    files = [file for shard in names for phase in phases(folder) for file in phase.files(shard)]
    gone = (f"data/gone/{number:07d}.idx" for number in range(RECORDS - len(files)))
    for file in [*(str(Path(file).relative_to(folder)) for file in files), *gone]:
        record = MetadataRecord(
            rule="convert",
            input=["data/parquet/phase1/part-00000.parquet", "data/converted/tokenizer.json"],
            shellcmd="x" * 300,  # as long as a real one
            params=[],
            record_format_version=RECORD_FORMAT_VERSION,
        )
        persistence._write_record(file, record)


def lose_some(folder: Path, shards: int) -> None:
    """Deletes every fiftieth shard."""
    for phase in phases(folder):
        for number in range(0, shards, 50):
            for path in phase.files(f"part-{number:05d}"):
                Path(path).unlink()


def lose_all(folder: Path, shards: int) -> None:
    """Deletes all shards."""
    for phase in phases(folder):
        shutil.rmtree(phase.folder, ignore_errors=True)


def nothing(folder: Path, shards: int) -> None:
    """Leaves the project as the state before has left it."""


STATES: dict[str, Callable[[Path, int], None]] = {
    "first look": convert_all,
    "done": nothing,
    "records": write_records,
    "2 % missing": lose_some,
    "cold": lose_all,
    "chunks": nothing,
    "run": nothing,
}
WAYS: dict[str, Callable[[Path, int], Path]] = {"plain": plain, "ours": ours}

if __name__ == "__main__":
    main()
