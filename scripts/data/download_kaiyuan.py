"""Downloads Parquet files of a phase that its source table lists, from the commit it records.

A file gets its name only when its SHA-256 is the table's; what an interrupted download has fetched
is used by the next one. Mirrors: `HF_ENDPOINT`; token: `HF_TOKEN`.

    python scripts/data/download_kaiyuan.py --phase 1 --parquet data/parquet part-00000.parquet
    python scripts/data/download_kaiyuan.py --phase 1 --parquet data/parquet          # all of them
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from scripts.data.hub import HubError, RemoteFile, Repository, require_space
from scripts.data.shards import Phase
from scripts.data.source_table import SourceTable, read_table, table_path


def main(argv: list[str] | None = None) -> None:
    """Downloads the named files of a phase, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--phase", type=int, required=True)
    parser.add_argument("--parquet", required=True, help="folder of phase1, phase2, … and tables")
    parser.add_argument("files", nargs="*", metavar="FILE", help="names; default: all of the phase")
    arguments = parser.parse_args(argv)
    phase = Phase(arguments.phase, arguments.parquet, "")
    try:
        download(phase, arguments.files)
    except (HubError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def download(phase: Phase, names: list[str]) -> None:
    """Downloads files of a phase by name into its folder; no names mean all."""
    path = table_path(phase.parquet, phase.number)
    if not path.exists():
        raise HubError(
            f"{path} does not exist: list the files first with "
            f"`snakemake manifest_phase{phase.number}` (scripts/data/source_manifest.py)"
        )
    table = read_table(path)
    if "commit" not in table.origin:
        raise HubError(
            f"{path} lists a local folder ({table.origin}): there is nothing to download"
        )
    if unknown := sorted(set(names) - table.files.keys()):
        raise HubError(f"{path} does not list {', '.join(unknown)}")
    repository = Repository(table.origin["repository"], "dataset", table.origin["commit"])
    files = [remote(table, name) for name in names or sorted(table.files)]
    targets = [Path(phase.raw_folder) / Path(file.path).name for file in files]
    pairs = list(zip(files, targets, strict=True))
    Path(phase.raw_folder).mkdir(parents=True, exist_ok=True)
    missing = sum(file.bytes for file, target in pairs if not target.exists())
    require_space(Path(phase.raw_folder), missing)
    for file, target in tqdm(pairs, "Downloading", unit="file", disable=None):
        repository.download(file, target)


def remote(table: SourceTable, name: str) -> RemoteFile:
    """Returns where a file of the table lies in the repository, and what it must contain."""
    file = table.files[name]
    return RemoteFile(f"{table.origin['folder']}/{name}", file.bytes, file.sha256)


if __name__ == "__main__":
    main()
