"""The shards of a phase: their names, their files, and which of them are missing or stale.

A shard is one Parquet file and what conversion makes of it: `.bin`, `.idx` and a sidecar `.json`
which records the source file's digest, the conversion recipe and the sizes of the other two.
Snakemake is shown only the shards that `stale_shards` returns, so that a dry run over 50,000
finished shards costs one listing of two folders and not 100,000 job objects.

A shard is stale if its content would now be another, and only then:
- a file of it is missing, or has not the size that the sidecar records (truncated, empty, torn);
- the conversion recipe (`conversion_recipe`) differs from the one in the sidecar;
- the Parquet file's digest differs. With a source table that has digests, the table says so.
  Without, the time stamp only raises the question: a file whose time stamp is new is hashed.

Opening 50,000 sidecars takes seconds, so what they say is remembered in one file beside the
phase's folder, `megatron_phase1.checked.json`: what each sidecar says and the digest of each
Parquet file, valid while that file keeps its size and time stamp. It is only a memory: delete it
and the next run reads and hashes again.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from scripts.common.files import canonical_json, read_json, replacing, sha256
from scripts.data.source_table import SourceFile, read_table, table_path

FORMAT_VERSION = 1  # raised when converted files change their meaning: makes every shard stale
SUFFIX = ".parquet"
PARTS = ("bin", "idx", "json")
MEMORY_VERSION = 1


def conversion_recipe(
    tokenizer: str | Path,
    text_key: str,
    end_of_document: str,
    special_tokens_in_text: str,
    invalid_utf8: str,
) -> dict[str, Any]:
    """Returns all that a shard's content depends on besides its Parquet file.

    The converter records it in the sidecar as `recipe`. `tokenizer` is the tokenizer's folder;
    while that is still to be downloaded its digest is None, which matches every shard.
    """
    definition = Path(tokenizer) / "tokenizer.json"
    return {
        "text_key": text_key,
        "end_of_document": end_of_document,
        "special_tokens_in_text": special_tokens_in_text,
        "invalid_utf8": invalid_utf8,
        "tokenizer_sha256": sha256(definition) if definition.exists() else None,
        "format_version": FORMAT_VERSION,
    }


def configured_recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the conversion recipe of config.yaml."""
    names = ("text_key", "end_of_document", "special_tokens_in_text", "invalid_utf8")
    recipe = {name: settings["recipe"][name] for name in names}
    return conversion_recipe(settings["paths"]["tokenizer"], **recipe)


def configured_phase(settings: dict[str, Any], number: int) -> "Phase":
    """Returns where config.yaml has the files of a phase.

    The shards of python_library are known before they are made.
    """
    recipe, paths = settings["recipe"], settings["paths"]
    made = recipe["source_shards"] if recipe["source"] == "python_library" else 0
    generated = tuple(f"part-{shard:05d}" for shard in range(made))
    return Phase(number, paths["parquet"], paths["converted"], generated, recipe["text_key"])


@dataclass(frozen=True)
class Phase:
    """Where the files of one phase lie; `parquet` and `converted` are the configured folders.

    `generated` names the shards of a corpus that rules make, whose Parquet files need not be there.
    """

    number: int
    parquet: str
    converted: str
    generated: tuple[str, ...] = ()
    text_key: str = "text"

    @property
    def raw_folder(self) -> str:
        """Returns the folder of the Parquet files."""
        return f"{self.parquet}/phase{self.number}"

    @property
    def folder(self) -> str:
        """Returns the folder of the converted shards."""
        return f"{self.converted}/megatron_phase{self.number}"

    def raw(self, shard: str) -> str:
        """Returns the path of a shard's Parquet file."""
        return f"{self.raw_folder}/{shard}{SUFFIX}"

    def file(self, shard: str, part: str) -> str:
        """Returns the path of a shard's `bin`, `idx` or `json` (sidecar)."""
        return f"{self.folder}/{self.prefix(shard)}.{part}"

    def prefix(self, shard: str) -> str:
        """Returns the name that a shard's files share, as the original project has it."""
        return f"phase{self.number}_{shard}_{self.text_key}_document"

    def files(self, shard: str) -> list[str]:
        """Returns the paths of all files that conversion makes of a shard."""
        return [self.file(shard, part) for part in PARTS]

    @cached_property
    def sources(self) -> dict[str, SourceFile | None]:
        """The shards by name in order; the value is None where no source table describes the file.

        Raises FileNotFoundError if there is neither a source table nor a Parquet file.
        """
        table = table_path(self.parquet, self.number)
        if table.exists():
            return {
                name.removesuffix(SUFFIX): file
                for name, file in sorted(read_table(table).files.items())
            }
        names = self.generated or self._parquet_names()
        if not names:
            raise FileNotFoundError(
                f"no Parquet files of phase {self.number}: neither in {self.raw_folder} nor listed "
                f"in {table}; put the files there, or download them: set recipe.source: hub, then "
                "`snakemake manifest_all` lists them"
            )
        return dict.fromkeys(names)

    def _parquet_names(self) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(self.raw_folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX))
            return [name.removesuffix(SUFFIX) for name in names]
        return []

    @property
    def shards(self) -> list[str]:
        """Returns the names of the phase's shards in order."""
        return list(self.sources)

    def missing_parquet(self) -> list[str]:
        """Returns the Parquet files that the source table lists and that are not there whole."""
        there = _listing(self.raw_folder, (SUFFIX,))
        return [
            self.raw(shard)
            for shard, listed in self.sources.items()
            if listed and there.get(f"{shard}{SUFFIX}", [0, -1])[1] != listed.bytes
        ]

    def drop_converted_parquet(self) -> None:
        """Deletes the Parquet files of finished shards that can be downloaded again.

        Snakemake drops each file itself once it is converted; this is for what is left where it
        was killed between the two.
        """
        unfinished = self.stale_shards(recipe={})
        for shard, listed in self.sources.items():
            if listed and listed.sha256 and shard not in unfinished:
                Path(self.raw(shard)).unlink(missing_ok=True)

    def newer_shards(self, time_ns: int) -> list[str]:
        """Returns the index files that were written after a time (ns since the epoch)."""
        written = _listing(self.folder, (".idx",))
        names = (f"{self.prefix(shard)}.idx" for shard in self.sources)
        return [f"{self.folder}/{name}" for name in names if written.get(name, [0])[0] > time_ns]

    def stale_shards(self, recipe: dict[str, Any]) -> dict[str, str]:
        """Returns the shards to convert, in order, each with the reason in words."""
        memory = _Memory.load(Path(f"{self.folder}.checked.json"))
        try:
            inspection = _Inspection(self, recipe, memory)
            return dict(inspection.stale())
        finally:
            memory.save()


def _listing(folder: str, suffixes: tuple[str, ...]) -> dict[str, list[int]]:
    """Returns [time in ns, bytes] of a folder's files by name; links to nothing are left out."""
    found = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffixes):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                found[entry.name] = [stat.st_mtime_ns, stat.st_size]
    return found


@dataclass
class _Memory:
    """What is known of a phase's files, in lists because JSON of 50,000 objects is slow.

    sidecars: shard → [[time, bytes] of the sidecar, bytes of [bin, idx], source bytes, source
    sha256, number of the recipe]; sources: shard → [[time, bytes] of the Parquet file, sha256].
    Times are in ns.
    """

    path: Path
    recipes: list[dict[str, Any]] = field(default_factory=list)
    sidecars: dict[str, list] = field(default_factory=dict)
    sources: dict[str, list] = field(default_factory=dict)
    changed: bool = False

    @classmethod
    def load(cls, path: Path) -> "_Memory":
        """Reads the memory; an absent, foreign or damaged one is an empty one."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            stored = read_json(path)
            if stored["version"] == MEMORY_VERSION:
                return cls(path, stored["recipes"], stored["sidecars"], stored["sources"])
        return cls(path)

    def save(self) -> None:
        """Writes the memory if it has learned something; being forbidden to is no error."""
        if self.changed:
            stored = {
                "version": MEMORY_VERSION,
                "recipes": self.recipes,
                "sidecars": self.sidecars,
                "sources": self.sources,
            }
            with suppress(OSError), replacing(self.path) as partial:
                partial.write_text(canonical_json(stored), encoding="utf-8")

    def remember_sidecar(self, shard: str, stat: list[int], sidecar: dict[str, Any]) -> list:
        """Takes over what a sidecar says; raises KeyError or TypeError if it does not say it."""
        recipe = sidecar["recipe"]
        if recipe not in self.recipes:
            self.recipes.append(recipe)
        source = sidecar["source"]
        sizes = [sidecar[part]["bytes"] for part in ("bin", "idx")]
        number = self.recipes.index(recipe)
        self.sidecars[shard] = [stat, sizes, source["bytes"], source["sha256"], number]
        self.changed = True
        return self.sidecars[shard]

    def remember_source(self, shard: str, stat: list[int], digest: str) -> None:
        """Notes the digest of a Parquet file for as long as its time stamp and size stay."""
        self.sources[shard] = [stat, digest]
        self.changed = True


class _Inspection:
    """One look at all files of a phase: two listings, one `stat` a file."""

    def __init__(self, phase: Phase, recipe: dict[str, Any], memory: _Memory) -> None:
        self.phase = phase
        self.recipe = recipe
        self.memory = memory
        self.converted = _listing(phase.folder, tuple(f".{part}" for part in PARTS))
        digests_listed = all(source and source.sha256 for source in phase.sources.values())
        self.raw = {} if digests_listed else _listing(phase.raw_folder, (SUFFIX,))
        self.recipe_changes: dict[int, str] = {}

    def stale(self) -> Iterator[tuple[str, str]]:
        """Yields the stale shards with their reasons, in order."""
        reasons = {
            shard: self.damage(shard) or self.outdated(shard) for shard in self.phase.sources
        }
        intact = [shard for shard, reason in reasons.items() if reason is None]
        reasons.update(self.changed_sources(intact))
        return ((shard, reason) for shard, reason in reasons.items() if reason)

    def damage(self, shard: str) -> str | None:
        """Says what is wrong with a shard's files, from their names and sizes alone."""
        prefix = self.phase.prefix(shard)
        stats = [self.converted.get(f"{prefix}.{part}") for part in PARTS]
        if None in stats:
            return f"{prefix}.{PARTS[stats.index(None)]} is missing"
        known = self.memory.sidecars.get(shard)
        if known is None or known[0] != stats[2]:
            try:
                sidecar = read_json(Path(self.phase.file(shard, "json")))
                known = self.memory.remember_sidecar(shard, stats[2], sidecar)
            except (OSError, ValueError, KeyError, TypeError):
                return f"{prefix}.json is not a shard's sidecar"
        for part, (_, size), recorded in zip(PARTS, stats, known[1], strict=False):
            if size != recorded:
                return f"{prefix}.{part} has {size} bytes and not {recorded}"
        return None

    def outdated(self, shard: str) -> str | None:
        """Says which settings have changed since a shard was converted."""
        number = self.memory.sidecars[shard][-1]
        if number not in self.recipe_changes:
            self.recipe_changes[number] = _difference(self.memory.recipes[number], self.recipe)
        return self.recipe_changes[number] or None

    def changed_sources(self, shards: Iterable[str]) -> dict[str, str]:
        """Says which Parquet files are no longer those that were converted; hashes the doubtful."""
        changed, doubtful = {}, {}
        for shard in shards:
            (shard_time, _), _, source_bytes, source_sha256, _ = self.memory.sidecars[shard]
            listed = self.phase.sources[shard]
            if listed and listed.sha256:
                if listed.sha256 != source_sha256:
                    changed[shard] = "the source table lists other content"
                continue
            raw = self.raw.get(f"{shard}{SUFFIX}")
            if raw is None:
                continue  # dropped after conversion
            known = self.memory.sources.get(shard)
            if raw[1] != source_bytes:
                changed[shard] = f"{self.phase.raw(shard)} has another size"
            elif known and known[0] == raw:
                if known[1] != source_sha256:
                    changed[shard] = f"{self.phase.raw(shard)} has other content"
            elif known or raw[0] > shard_time:
                doubtful[shard] = raw
            else:
                self.memory.remember_source(shard, raw, source_sha256)
        return changed | self.hashed(doubtful)

    def hashed(self, doubtful: dict[str, list[int]]) -> dict[str, str]:
        """Hashes Parquet files whose time stamps are new; returns those with other content."""
        changed = {}
        if not doubtful:
            return changed
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = pool.map(sha256, (self.phase.raw(shard) for shard in doubtful))
            progress = tqdm(digests, "Hashing touched files", len(doubtful), disable=None)
            for (shard, raw), digest in zip(doubtful.items(), progress, strict=True):
                self.memory.remember_source(shard, raw, digest)
                if digest != self.memory.sidecars[shard][3]:
                    changed[shard] = f"{self.phase.raw(shard)} has other content"
        return changed


def _difference(recorded: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Names the settings in which two recipes differ; "" if none. None matches everything."""
    return ", ".join(
        f"{key} was {recorded.get(key)!r} and is {value!r}"
        for key, value in wanted.items()
        if value is not None and recorded.get(key) != value
    )
