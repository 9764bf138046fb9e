"""Tests of the phase manifest, against pyarrow and Megatron's reader."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from scripts.common.files import read_json, write_json
from scripts.data.phase_manifest import build_manifest, main, read_manifest
from scripts.data.shards import Phase
from tests.data.phase_corpus import random_shards, write_phase

SIZES = [5, 0, 3]
NAMES = [f"part-{number:05d}" for number in range(len(SIZES))]


def rebuild(folder, names=NAMES):
    """Makes the manifest of a written phase again."""
    return build_manifest(
        Phase(3, "", str(folder)), names, folder / "megatron_phase3.manifest.parquet"
    )


def change_sidecar(folder, name, **changes):
    """Changes entries of a shard's sidecar."""
    path = folder / "megatron_phase3" / f"phase3_{name}_text_document.json"
    write_json(path, read_json(path) | changes)


def test_rows_agree_with_the_shards(tmp_path):
    manifest = write_phase(tmp_path, random_shards(1, SIZES))
    table = pq.read_table(manifest.path).to_pandas()
    assert table.shard.tolist() == NAMES
    assert table.documents.tolist() == SIZES
    for row in table[table.documents > 0].itertuples():
        stored = IndexedDataset(str(tmp_path / row.prefix))
        assert (len(stored), stored.sequence_lengths.sum()) == (row.documents, row.tokens)
    assert table.rank_min.isna().tolist() == [False, True, False]


def test_reading_gives_what_was_written(tmp_path):
    written = write_phase(tmp_path, random_shards(1, SIZES))
    read = read_manifest(written.path)
    assert (read.digest, read.phase, read.common) == (written.digest, 3, written.common)
    assert read.table.equals(written.table)
    assert (read.documents, read.first_documents.tolist()) == (8, [0, 5, 5, 8])


def test_the_digest_follows_the_content_and_nothing_else(tmp_path):
    first = write_phase(tmp_path, random_shards(1, SIZES)).digest
    assert rebuild(tmp_path, NAMES[::-1]).digest == first
    change_sidecar(tmp_path, NAMES[0], seconds=99)
    assert rebuild(tmp_path).digest == first
    assert rebuild(tmp_path, NAMES[:2]).digest != first
    assert write_phase(tmp_path, random_shards(2, SIZES)).digest != first


def test_the_folder_can_be_moved(tmp_path):
    write_phase(tmp_path / "old", random_shards(1, SIZES))
    (tmp_path / "old").rename(tmp_path / "new")
    manifest = read_manifest(tmp_path / "new" / "megatron_phase3.manifest.parquet")
    assert all(Path(f"{prefix}.idx").exists() for prefix in manifest.prefixes)


def test_a_missing_shard_is_named(tmp_path):
    write_phase(tmp_path, random_shards(1, SIZES))
    (tmp_path / "megatron_phase3/phase3_part-00002_text_document.bin").unlink()
    with pytest.raises(ValueError, match=r"part-00002_text_document\.bin is missing"):
        rebuild(tmp_path)


def test_a_truncated_shard_is_named(tmp_path):
    write_phase(tmp_path, random_shards(1, SIZES))
    path = tmp_path / "megatron_phase3/phase3_part-00000_text_document.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"part-00000.*\.bin has \d+ bytes, its sidecar says"):
        rebuild(tmp_path)


def test_a_mixture_of_settings_is_refused(tmp_path):
    write_phase(tmp_path, random_shards(1, SIZES))
    change_sidecar(tmp_path, NAMES[2], end_of_document_id=17)
    with pytest.raises(ValueError, match=r"part-00002.*end_of_document_id is 17, but 0"):
        rebuild(tmp_path)


def test_no_shards_and_doubles_are_refused(tmp_path):
    write_phase(tmp_path, random_shards(1, SIZES))
    with pytest.raises(ValueError, match="no shards"):
        rebuild(tmp_path, [])
    with pytest.raises(ValueError, match="listed twice: part-00001"):
        rebuild(tmp_path, [*NAMES, "part-00001"])


def test_another_parquet_file_is_not_taken_for_a_manifest(tmp_path):
    write_phase(tmp_path, random_shards(1, SIZES))
    path = tmp_path / "other.parquet"
    pq.write_table(
        pq.read_table(
            tmp_path / "megatron_phase3.manifest.parquet", columns=["shard"]
        ).replace_schema_metadata({}),
        path,
    )
    with pytest.raises(ValueError, match="not a manifest"):
        read_manifest(path)


def test_the_command_line_ends_with_one_line_on_an_error(tmp_path, capsys):
    raw = tmp_path / "parquet/phase3"
    raw.mkdir(parents=True)
    (raw / "part-00000.parquet").touch()
    arguments = f"--phase 3 --parquet-dir {tmp_path}/parquet --converted-dir {tmp_path} --output m"
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert "phase3_part-00000_text_document.json is missing: convert" in str(ended.value)
    write_phase(tmp_path, random_shards(1, [4]))
    main(arguments.replace("--output m", f"--output {tmp_path}/m").split())
    assert "1 shards, 4 documents" in capsys.readouterr().out
    assert json.loads(pq.read_schema(tmp_path / "m").metadata[b"phase_manifest"])["phase"] == 3
