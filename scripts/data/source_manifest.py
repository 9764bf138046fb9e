"""Lists the Parquet files of a phase, with sizes and digests, in a source table.

From the hub: names, sizes and SHA-256 come from the repository's listing at one commit, which the
table records; downloads take that commit, whatever happens upstream. From a folder: names and
sizes, and digests if asked for. The table is what later runs work from, without the hub.

A table that exists is compared and not replaced: a difference is printed and the exit code is 1,
until `--update` says that the new listing is wanted.

    python scripts/data/source_manifest.py --phase 1 --parquet data/parquet \\
        --repository thu-pacman/PCMind-2.1-Kaiyuan-2B --revision main
    python scripts/data/source_manifest.py --phase 1 --parquet data/parquet --digests
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from scripts.common.files import sha256
from scripts.data.hub import HubError, Repository
from scripts.data.shards import SUFFIX, Phase
from scripts.data.source_table import SourceFile, SourceTable, read_table, table_path, write_table

SHOWN = 10  # names printed of a long list of differences


def main(argv: list[str] | None = None) -> None:
    """Writes the source tables of the phases, or compares them with the source."""
    arguments = parse(argv)
    try:
        reports = [manifest(arguments, phase) for phase in arguments.phase]
    except (HubError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if any(reports):
        sys.exit("\n".join(report for report in reports if report))


def manifest(arguments: argparse.Namespace, phase: int) -> str:
    """Writes the source table of a phase, or returns in what the source differs from it."""
    path = table_path(arguments.parquet, phase)
    listed = listing(arguments, phase)
    if path.exists() and not arguments.update:
        return compare(path, read_table(path), listed)
    write_table(path, listed)
    size = sum(file.bytes for file in listed.files.values())
    print(f"{path}: {len(listed.files):,} files, {size / 1e9:,.1f} GB, {listed.origin}")
    return ""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--phase", type=int, nargs="+", required=True)
    parser.add_argument("--parquet", required=True, help="folder of phase1, phase2, … and tables")
    parser.add_argument("--repository", help="dataset repository on the hub; without: a folder")
    parser.add_argument("--revision", default="main", help="branch, tag, refs/pr/N or commit")
    parser.add_argument("--folder", default="phase{phase}", help="in the repository")
    parser.add_argument("--digests", action="store_true", help="hash the files of a local folder")
    parser.add_argument("--update", action="store_true", help="replace a table that differs")
    return parser.parse_args(argv)


def listing(arguments: argparse.Namespace, phase: int) -> SourceTable:
    """Lists a phase's files where the command line says that they are."""
    if arguments.repository:
        folder = arguments.folder.replace("{phase}", str(phase))
        return hub_listing(arguments.repository, arguments.revision, folder)
    return local_listing(Phase(phase, arguments.parquet, ""), arguments.digests)


def hub_listing(repository: str, revision: str, folder: str) -> SourceTable:
    """Lists a folder of a dataset repository at the commit that the revision means now."""
    commit = Repository(repository, "dataset", revision).commit()
    files = {
        name: file
        for name, file in Repository(repository, "dataset", commit).files(folder).items()
        if name.endswith(SUFFIX)
    }
    if not files:
        raise HubError(f"{repository}@{commit[:12]} has no Parquet files in {folder}/")
    for file in files.values():
        if len(file.digest) != 64:
            raise HubError(f"{repository}: {file.path} is stored without a SHA-256 (not by LFS)")
    origin = {
        "repository": repository,
        "revision": revision,
        "commit": commit,
        "folder": folder,
    }
    return SourceTable(
        origin, {name: SourceFile(file.bytes, file.digest) for name, file in files.items()}
    )


def local_listing(phase: Phase, digests: bool) -> SourceTable:
    """Lists the Parquet files of a phase's folder; hashes them only if asked to."""
    folder = Path(phase.raw_folder)
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise FileNotFoundError(f"no Parquet files in {folder}")
    files = {
        path.name: SourceFile(path.stat().st_size, sha256(path) if digests else "")
        for path in tqdm(paths, "Listing", disable=None if digests else True)
    }
    return SourceTable({"folder": phase.raw_folder}, files)


def compare(path: Path, table: SourceTable, listed: SourceTable) -> str:
    """Returns in what the source is no longer what the table says; "" if it still is."""
    both = table.files.keys() & listed.files.keys()
    changes = {
        "new": listed.files.keys() - table.files.keys(),
        "gone": table.files.keys() - listed.files.keys(),
        "changed": {name for name in both if differ(table.files[name], listed.files[name])},
    }
    if not any(changes.values()):
        print(f"{path}: {len(table.files):,} files, as in the source")
        return ""
    lines = [
        f"{len(names):,} {kind}: {', '.join(sorted(names)[:SHOWN])}{' …' * (len(names) > SHOWN)}"
        for kind, names in changes.items()
        if names
    ]
    return (
        f"{path} stays as it is, but the source has changed since it was made:\n  "
        + "\n  ".join(lines)
        + f"\nwas {table.origin}\nis  {listed.origin}\n"
        "Run scripts/data/source_manifest.py with --update to take over the new listing: shards "
        "whose content has changed are made again"
    )


def differ(one: SourceFile, other: SourceFile) -> bool:
    """Says whether two files are known to differ; an absent digest is no difference."""
    digests_differ = one.sha256 and other.sha256 and one.sha256 != other.sha256
    return one.bytes != other.bytes or bool(digests_differ)


if __name__ == "__main__":
    main()
