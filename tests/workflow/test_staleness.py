"""The tables of docs/data.md, line by line, with the real snakemake: what makes shards stale."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from snakemake.persistence.file import FilePersistence

from tests.workflow.conftest import Checkout

CONVERTED = "smoke/data/converted"
PARQUET = "smoke/data/parquet"
SHARDS = 4  # two phases of two shards
ONE = "phase1_part-00000_text_document"


def conversions(checkout: Checkout, *settings: str, target: str = "converted_all") -> int:
    """How many shards a dry run would convert."""
    return checkout.planned(target, "--config", "phases=2", *settings).get("convert", 0)


def shard(checkout: Checkout, part: str) -> Path:
    return checkout.path / CONVERTED / "megatron_phase1" / f"{ONE}.{part}"


def parquet(checkout: Checkout) -> Path:
    return checkout.path / PARQUET / "phase1/part-00000.parquet"


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "setting",
    [
        "recipe={text_key: body}",
        "recipe={end_of_document: '<|im_end|>'}",
        "recipe={special_tokens_in_text: as_special}",
        "recipe={invalid_utf8: replace}",
    ],
)
def test_settings_that_shape_a_shard_make_all_stale(converted_run: Checkout, setting: str) -> None:
    assert conversions(converted_run, setting) == SHARDS


def test_another_tokenizer_makes_all_shards_stale(converted: Checkout) -> None:
    path = converted.path / "smoke/data/tokenizer/tokenizer.json"
    definition = json.loads(path.read_text())
    definition["normalizer"] = None
    path.write_text(json.dumps(definition))
    assert conversions(converted) == SHARDS


def test_a_new_format_version_makes_all_shards_stale(converted: Checkout) -> None:
    path = converted.path / "scripts/data/shards.py"
    replace_text(path, "FORMAT_VERSION = 1 ", "FORMAT_VERSION = 2 ")
    assert conversions(converted) == SHARDS


def test_other_content_of_a_parquet_file_makes_its_shard_stale(converted: Checkout) -> None:
    content = parquet(converted).read_bytes()
    parquet(converted).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert conversions(converted) == 1


def test_other_content_with_an_old_time_stamp_makes_its_shard_stale(converted: Checkout) -> None:
    assert conversions(converted) == 0
    content = parquet(converted).read_bytes()
    parquet(converted).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(parquet(converted), (1_000_000, 1_000_000))
    assert conversions(converted) == 1


def test_another_digest_in_the_source_table_makes_its_shard_stale(converted: Checkout) -> None:
    converted.smoke("manifest_phase1", "--config", "phases=2")
    table = converted.path / PARQUET / "phase1.files.tsv"
    digest = json.loads(shard(converted, "json").read_text())["source"]["sha256"]
    text = re.sub(r"(part-00000.parquet\t\d+\t).*", rf"\g<1>{digest}", table.read_text())
    table.write_text(text)
    assert conversions(converted) == 0
    table.write_text(text.replace(digest, "0" * 64))
    assert conversions(converted) == 1


def test_what_leaves_content_alone_makes_no_shard_stale(converted: Checkout) -> None:
    for path in (converted.path / PARQUET).rglob("*.parquet"):
        os.utime(path)  # a touch
    for path in (converted.path / CONVERTED).rglob("*.bin"):
        os.utime(path, (1_000_000, 1_000_000))  # a copy from elsewhere
    conversion = converted.path / "scripts/data/conversion.py"
    conversion.write_text(conversion.read_text() + "\n# refactored\n")
    replace_text(converted.path / "rules/common.smk", "exec python -m", "exec  python -m")
    sidecar = json.loads(shard(converted, "json").read_text())
    shard(converted, "json").write_text(json.dumps(sidecar | {"engine_version": "9.9.9"}))
    shutil.rmtree(converted.path / ".snakemake")
    shutil.rmtree(converted.path / "smoke/artifacts/logs")
    runtime = "runtime={convert_threads: 2, tokenizer_engine: tokenizers, parallel_downloads: 1}"
    assert conversions(converted, runtime) == 0


def lose(part: str) -> Callable[[Path], None]:
    return lambda prefix: prefix.with_name(f"{prefix.name}.{part}").unlink()


def truncate(part: str, size: int) -> Callable[[Path], None]:
    return lambda prefix: os.truncate(f"{prefix}.{part}", size)


def make_read_only(prefix: Path) -> None:
    os.truncate(f"{prefix}.bin", 100)
    for part in ("bin", "idx", "json"):
        Path(f"{prefix}.{part}").chmod(0o444)


def take_from_another_tokenizer(prefix: Path) -> None:
    path = Path(f"{prefix}.json")
    sidecar = json.loads(path.read_text())
    sidecar["recipe"]["tokenizer_sha256"] = "0" * 64
    path.write_text(json.dumps(sidecar))


def kill_its_job(prefix: Path) -> None:
    Path(f"{prefix}.idx").unlink()
    for part in ("bin.partial", "idx.partial", "json.partial", "lock"):
        Path(f"{prefix}.{part}").write_bytes(b"half")


DAMAGES = [
    [lose("bin"), lose("idx"), truncate("json", 0), truncate("bin", 100)],
    [truncate("idx", 0), make_read_only, take_from_another_tokenizer, kill_its_job],
]


@pytest.mark.parametrize("damages", DAMAGES)
def test_damage_is_found_and_the_same_command_repairs_it(
    converted: Checkout, damages: list[Callable[[Path], None]]
) -> None:
    """Each of the four shards has a damage of its own."""
    folder = converted.path / CONVERTED
    indexes = sorted(folder.glob("megatron_phase*/*.idx"))
    files = [file for index in indexes for file in (index, index.with_suffix(".bin"))]
    contents = {file: file.read_bytes() for file in files}
    for damage, index in zip(damages, indexes, strict=True):
        damage(index.with_suffix(""))
    manifests = [f"{CONVERTED}/megatron_phase{phase}.manifest.parquet" for phase in (1, 2)]
    assert converted.planned(*manifests, "--config", "phases=2")["convert"] == SHARDS
    converted.smoke(*manifests, "--config", "phases=2")
    assert all(path.read_bytes() == content for path, content in contents.items())
    assert not [*folder.rglob("*.partial"), *folder.rglob("*.lock")]
    assert conversions(converted) == 0


def test_a_link_to_nothing_is_said_by_a_dry_run_and_repaired_by_a_run(converted: Checkout) -> None:
    before = shard(converted, "bin").read_bytes()
    shard(converted, "bin").unlink()
    shard(converted, "bin").symlink_to("/nowhere/file")
    arguments = ("converted_all", "--config", "phases=2")
    output = converted.smoke(*arguments, "--dry-run", succeeds=False)
    assert f"links to nothing, such as {CONVERTED}/megatron_phase1/{ONE}.bin" in output
    converted.smoke(*arguments)
    assert shard(converted, "bin").read_bytes() == before
    assert not shard(converted, "bin").is_symlink()


def test_force_and_summary_see_the_finished_shards(converted_run: Checkout) -> None:
    for force in (("--forcerun", "convert"), ("--forceall",)):
        forced = converted_run.planned("converted_all", "--config", "phases=2", *force)
        assert forced["convert"] == SHARDS
    summary = converted_run.smoke("converted_all", "--config", "phases=2", "--summary")
    assert len(re.findall(rf"^{CONVERTED}.*\.idx\t", summary, flags=re.MULTILINE)) == SHARDS


def test_touch_leaves_finished_shards_finished(converted: Checkout) -> None:
    converted.smoke("converted_all", "--config", "phases=2", "--touch")
    assert conversions(converted) == 0


def test_a_mark_of_a_killed_run_counts_where_the_shard_is_not_whole(converted: Checkout) -> None:
    marks = FilePersistence(path=converted.path / ".snakemake")
    for index in (converted.path / CONVERTED).glob("megatron_phase1/*.idx"):
        marks._mark_incomplete(str(index.relative_to(converted.path)), None)
    lose("idx")(shard(converted, "idx").with_suffix(""))
    assert conversions(converted, "--rerun-incomplete") == 1


def test_delete_all_output_deletes_the_finished_shards(converted: Checkout) -> None:
    converted.smoke("converted_all", "--config", "phases=2", "--delete-all-output")
    left = {path.suffix for path in (converted.path / CONVERTED).glob("megatron_*/*")}
    assert not left & {".bin", ".idx"}
    assert conversions(converted) == SHARDS


def test_a_touch_does_not_make_a_stale_shard_current(converted: Checkout) -> None:
    os.truncate(shard(converted, "bin"), 100)
    converted.smoke("converted_all", "--config", "phases=2", "--touch")
    assert conversions(converted) == 1


def test_a_fresh_checkout_without_lists_says_so_in_a_sentence(checkout: Checkout) -> None:
    output = checkout.run(
        "--dry-run", "converted_all", "--config", "recipe={source: hub}", succeeds=False
    )
    assert "no Parquet files of phase 1" in output
    assert "`snakemake manifest_all` lists them" in output
