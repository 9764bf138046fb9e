"""Staleness is a matter of content: each cause alone makes exactly its shards stale."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from scripts.data import shards
from scripts.data.shards import Phase, conversion_recipe
from scripts.data.source_table import SourceFile, SourceTable, read_table, table_path, write_table

NAMES = ["part-00000", "part-00001", "part-00002"]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    return conversion_recipe(tmp_path / "tokenizer", "text", "<|endoftext|>", "as_text", "error")


@pytest.fixture
def phase(tmp_path, recipe):
    """A phase of three converted shards, as the converter leaves them."""
    phase = Phase(1, str(tmp_path / "parquet"), str(tmp_path / "converted"))
    for name in NAMES:
        write_raw(phase, name, f"rows of {name}")
        convert(phase, name, recipe)
    return phase


def write_raw(phase, name, text, time=1_000):
    path = Path(phase.raw(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time, time))


def convert(phase, name, recipe):
    """Stands for the converter: copies the text, records what it depended on."""
    raw = Path(phase.raw(name)).read_bytes()
    paths = {part: Path(phase.file(name, part)) for part in ("bin", "idx", "json")}
    paths["bin"].parent.mkdir(parents=True, exist_ok=True)
    paths["bin"].write_bytes(raw)
    paths["idx"].write_bytes(raw[:3])
    sidecar = {
        "source": {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()},
        "bin": {"bytes": len(raw)},
        "idx": {"bytes": 3},
        "recipe": recipe,
    }
    paths["json"].write_text(json.dumps(sidecar))


def fresh(phase):
    """The same phase as another process would see it."""
    return Phase(phase.number, phase.parquet, phase.converted)


@pytest.fixture
def hashed(monkeypatch):
    """The paths that were hashed."""
    paths = []
    monkeypatch.setattr(
        shards,
        "sha256",
        lambda path: (
            paths.append(Path(path).name) or hashlib.sha256(Path(path).read_bytes()).hexdigest()
        ),
    )
    return paths


def test_converted_shards_are_not_stale_and_nothing_is_hashed(phase, recipe, hashed):
    assert phase.shards == NAMES
    assert phase.stale_shards(recipe) == {}
    assert hashed == []


@pytest.mark.parametrize("part", ["bin", "idx", "json"])
def test_a_missing_file_makes_its_shard_stale(phase, recipe, part):
    Path(phase.file(NAMES[1], part)).unlink()
    reasons = phase.stale_shards(recipe)
    assert list(reasons) == [NAMES[1]]
    assert reasons[NAMES[1]].endswith(f"{part} is missing")


@pytest.mark.parametrize("part", ["bin", "idx", "json"])
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("known", [False, True])
def test_a_truncated_file_makes_its_shard_stale(phase, recipe, part, size, known):
    if known:
        phase.stale_shards(recipe)
    os.truncate(phase.file(NAMES[2], part), size)
    assert list(phase.stale_shards(recipe)) == [NAMES[2]]


def test_a_dangling_link_is_a_missing_file(phase, recipe):
    path = Path(phase.file(NAMES[0], "bin"))
    path.unlink()
    path.symlink_to("nowhere")
    assert list(phase.stale_shards(recipe)) == [NAMES[0]]


def test_a_foreign_json_in_the_sidecars_place_makes_the_shard_stale(phase, recipe):
    Path(phase.file(NAMES[0], "json")).write_text('{"source": 3}')
    assert "not a shard's sidecar" in phase.stale_shards(recipe)[NAMES[0]]


@pytest.mark.parametrize("key", ["text_key", "end_of_document", "invalid_utf8", "format_version"])
def test_each_setting_of_the_recipe_makes_all_shards_stale_and_is_named(phase, recipe, key):
    reasons = phase.stale_shards(recipe | {key: "other"})
    assert list(reasons) == NAMES
    assert f"{key} was {recipe[key]!r} and is 'other'" in reasons[NAMES[0]]
    assert fresh(phase).stale_shards(recipe) == {}


def test_only_shards_of_the_other_recipe_are_stale(phase, recipe):
    convert(phase, NAMES[1], recipe | {"text_key": "body"})
    assert list(phase.stale_shards(recipe)) == [NAMES[1]]


def test_another_tokenizer_makes_shards_stale_and_an_absent_one_does_not(phase, recipe, tmp_path):
    definition = tmp_path / "tokenizer/tokenizer.json"
    settings = ("text", "<|endoftext|>", "as_text", "error")
    definition.write_text('{"other": 1}')
    assert len(phase.stale_shards(conversion_recipe(definition.parent, *settings))) == 3
    definition.unlink()
    assert phase.stale_shards(conversion_recipe(definition.parent, *settings)) == {}


def test_a_touched_file_is_hashed_once_and_is_not_stale(phase, recipe, hashed):
    os.utime(phase.raw(NAMES[1]))
    assert phase.stale_shards(recipe) == {}
    assert fresh(phase).stale_shards(recipe) == {}
    assert hashed == ["part-00001.parquet"]


def test_new_content_of_the_same_size_is_found_and_hashed_once(phase, recipe, hashed):
    write_raw(phase, NAMES[1], "ROWS OF part-00001", time=4_000_000_000)
    assert "other content" in phase.stale_shards(recipe)[NAMES[1]]
    assert list(fresh(phase).stale_shards(recipe)) == [NAMES[1]]
    assert hashed == ["part-00001.parquet"]
    convert(phase, NAMES[1], recipe)
    assert fresh(phase).stale_shards(recipe) == {}
    assert hashed == ["part-00001.parquet"]


def test_other_content_with_an_older_time_stamp_is_found_once_the_shard_was_seen(phase, recipe):
    phase.stale_shards(recipe)
    write_raw(phase, NAMES[0], "ROWS OF part-00000", time=500)
    assert list(phase.stale_shards(recipe)) == [NAMES[0]]


def test_another_size_needs_no_hash(phase, recipe, hashed):
    write_raw(phase, NAMES[0], "more rows than before", time=500)
    assert list(phase.stale_shards(recipe)) == [NAMES[0]]
    assert hashed == []


def test_a_dropped_parquet_file_leaves_its_shard_alone(phase, recipe):
    rows = {f"{name}.parquet": SourceFile(18, "") for name in NAMES}
    write_table(table_path(phase.parquet, 1), SourceTable({}, rows))
    for name in NAMES:
        Path(phase.raw(name)).unlink()
    assert phase.stale_shards(recipe) == {}


def test_the_source_table_decides_by_digest_and_names_the_shards(phase, recipe, hashed):
    digests = {n: hashlib.sha256(f"rows of {n}".encode()).hexdigest() for n in NAMES}
    digests[NAMES[2]] = "0" * 64
    rows = {f"{n}.parquet": SourceFile(18, digest) for n, digest in digests.items()}
    rows["part-00003.parquet"] = SourceFile(18, "1" * 64)
    write_table(table_path(phase.parquet, 1), SourceTable({}, rows))
    for name in NAMES:
        os.utime(phase.raw(name))
    assert list(phase.stale_shards(recipe)) == [NAMES[2], "part-00003"]
    assert hashed == []


def test_a_lost_or_damaged_memory_changes_nothing(phase, recipe):
    phase.stale_shards(recipe)
    memory = Path(f"{phase.folder}.checked.json")
    for text in ("", "[]", '{"version": 1}'):
        memory.write_text(text)
        assert phase.stale_shards(recipe) == {}


def test_a_phase_without_files_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="snakemake manifest_all"):
        _ = Phase(3, str(tmp_path), str(tmp_path)).shards


def test_generated_shards_need_no_files_to_have_names(tmp_path, recipe):
    phase = Phase(1, str(tmp_path), str(tmp_path), generated=("part-00000", "part-00001"))
    assert list(phase.stale_shards(recipe)) == ["part-00000", "part-00001"]


def test_missing_parquet_files_are_those_absent_or_of_another_size(phase):
    assert phase.missing_parquet() == []
    rows = {f"{name}.parquet": SourceFile(18) for name in [*NAMES, "part-00003"]}
    write_table(table_path(phase.parquet, 1), SourceTable({}, rows))
    write_raw(phase, NAMES[1], "short")
    assert fresh(phase).missing_parquet() == [phase.raw(NAMES[1]), phase.raw("part-00003")]


def test_only_parquet_files_of_finished_shards_with_a_listed_digest_are_dropped(phase):
    digest = hashlib.sha256(b"rows of part-00000").hexdigest()
    files = {"part-00000.parquet": digest, "part-00001.parquet": "0" * 64, "part-00002.parquet": ""}
    rows = {name: SourceFile(18, sha256) for name, sha256 in files.items()}
    write_table(table_path(phase.parquet, 1), SourceTable({}, rows))
    fresh(phase).drop_converted_parquet()
    assert [Path(phase.raw(name)).exists() for name in NAMES] == [False, True, True]


def test_newer_shards_are_those_written_after_a_time(phase):
    index = Path(phase.file(NAMES[1], "idx"))
    os.utime(index, ns=(5_000_000_000_000_000_001, 5_000_000_000_000_000_001))
    assert phase.newer_shards(5_000_000_000_000_000_000) == [str(index)]


def test_source_tables_survive_writing_and_reading(tmp_path):
    table = SourceTable(
        {"repo": "owner/name", "revision": "c0ffee"},
        {"b.parquet": SourceFile(3, "ab"), "a": SourceFile(0)},
    )
    write_table(tmp_path / "t.tsv", table)
    assert read_table(tmp_path / "t.tsv") == table


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("# {}\n", 1),
        ("# {}\nfile\tsize\n", 2),
        ("# {}\nfile\tbytes\tsha256\na\tmany\t\n", 3),
    ],
)
def test_a_damaged_source_table_is_an_error_that_names_the_line(tmp_path, text, line):
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(ValueError, match=rf"t\.tsv, line {line}: "):
        read_table(tmp_path / "t.tsv")
