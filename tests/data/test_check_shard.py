import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from scripts.common.files import sha256
from scripts.data import check_shard, convert_phase_to_megatron

END = 1021
TEXTS = ["first", None, "", "zwei <|endoftext|> Eulen", "e\u0301 drei\r\n", "四\x00"] * 5


@pytest.fixture(params=["as_text", "as_special"])
def shard(request, tokenizer_folder, tmp_path):
    """A right shard with ranks; returns its prefix."""
    table = {"text": TEXTS, "rank": np.arange(len(TEXTS)) / 7}
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.table(table), tmp_path / "parquet/part-00000.parquet")
    convert_phase_to_megatron.main(
        f"--input-dir {tmp_path}/parquet --output-dir {tmp_path}/out --output-prefix-prefix phase3"
        f" --tokenizer-model {tokenizer_folder} --special-tokens-in-text {request.param}".split()
    )
    return tmp_path / "out/phase3_part-00000_text_document"


@pytest.fixture
def check(tokenizer_folder, tmp_path):
    """Runs the command line on all shards."""

    def run():
        check_shard.main(
            f"--folder {tmp_path}/out --tokenizer-model {tokenizer_folder}"
            f" --parquet-dir {tmp_path}/parquet --documents 100".split()
        )

    return run


def rewrite(prefix, documents):
    """Writes other documents with Megatron's builder, and a sidecar that believes in them."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for ids in documents:
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    sidecar = json.loads(prefix.with_suffix(".json").read_text())
    for end in ("bin", "idx"):
        path = prefix.with_suffix(f".{end}")
        sidecar[end] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    sidecar["tokens"] = sum(map(len, documents))
    prefix.with_suffix(".json").write_text(json.dumps(sidecar))


def documents_of(prefix):
    lengths = np.frombuffer(prefix.with_suffix(".idx").read_bytes(), "<i4", 20, 34)
    ids = np.fromfile(prefix.with_suffix(".bin"), np.uint16)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def test_a_right_shard_is_right(shard, check, capsys):
    check()
    assert "1 shards are right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suffix", "damage", "said"),
    [
        (".bin", lambda content: content[:-2], "tokens, its index"),
        (".bin", lambda content: content + b"\0", "size|bytes|multiple"),
        (".bin", lambda content: b"\1" + content[1:], "bin is .*sha256.* its sidecar says"),
        (".idx", lambda content: content[:-1], "bytes, not those of 20 documents"),
        (".idx", lambda content: b"", "is not a Megatron index"),
        (".json", lambda content: b"{", "is not valid JSON"),
        (".json", lambda content: b"{}", "lacks 'dtype'"),
        (".rank.npy", lambda content: content[:-4], "document: Failed to read all data"),
    ],
)
def test_damage_is_found_and_named(shard, check, suffix, damage, said):
    path = shard.with_name(shard.name + suffix)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match=said):
        check()


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".rank.npy"])
def test_a_missing_file_is_named(shard, check, suffix):
    shard.with_name(shard.name + suffix).unlink()
    with pytest.raises(SystemExit, match=rf"document{suffix} is missing"):
        check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda documents: documents[3].__setitem__(-1, 5), "document 3 does not end with 1021"),
        (lambda documents: documents[3].__setitem__(0, 1024), "ids from 0 to 1024"),
        (lambda documents: documents.__setitem__(2, [END]), "document 2 has no text"),
        (lambda documents: documents[0].__setitem__(0, 77), r"document 0 is not row 0 of"),
        (lambda documents: documents.reverse(), r"document 0 is not row 0 of"),
        (lambda documents: [d.insert(0, END) for d in documents], r"4[05] ends of documents in 20"),
    ],
)
def test_wrong_content_is_found_though_digests_agree(shard, check, change, said):
    documents = documents_of(shard)
    change(documents)
    rewrite(shard, documents)
    with pytest.raises(SystemExit, match=said):
        check()


def test_another_parquet_file_is_found(shard, check, tmp_path):
    pq.write_table(pa.table({"text": ["other"]}), tmp_path / "parquet/part-00000.parquet")
    with pytest.raises(SystemExit, match=r"is not the file that .* was made from"):
        check()


def test_another_tokenizer_is_found(shard, tokenizer_folder, tmp_path):
    content = (tokenizer_folder / "tokenizer.json").read_text() + "\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.json").write_text(content)
    with pytest.raises(SystemExit, match="was made with another tokenizer than"):
        check_shard.main(f"--shard {shard} --tokenizer-model {tmp_path}/other".split())


def test_other_ranks_are_found(shard, check):
    np.save(f"{shard}.rank.npy", np.zeros(20))
    with pytest.raises(SystemExit, match=r"rank.npy: .*'max': .*its sidecar says"):
        check()
