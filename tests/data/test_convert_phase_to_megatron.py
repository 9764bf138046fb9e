import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from transformers import AutoTokenizer

from scripts.common.files import locked
from scripts.data import convert_phase_to_megatron
from scripts.data.conversion import occurrences
from scripts.data.convert_phase_to_megatron import main
from scripts.data.engines import EngineError, FastokensEngine

END = 1021


@pytest.fixture
def command(tokenizer_folder, tmp_path):
    """Returns the arguments that convert files into tmp_path/out."""

    def build(*paths, options=()):
        return [
            *("--input", *map(str, paths)),
            *("--output-dir", str(tmp_path / "out"), "--output-prefix-prefix", "phase3"),
            *("--tokenizer-model", str(tokenizer_folder), *options),
        ]

    return build


@pytest.fixture
def convert(command, tmp_path):
    """Converts a file; returns the prefix of its shard."""

    def run(path, *options):
        main(command(path, options=options))
        return tmp_path / "out" / f"phase3_{path.stem}_text_document"

    return run


@pytest.fixture
def parquet(tmp_path):
    """Writes texts, and perhaps ranks, to a Parquet file."""

    def write(texts, name="part-00000", **columns):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": texts, **columns}), path)
        return path

    return write


def sidecar(prefix):
    return json.loads(prefix.with_name(prefix.name + ".json").read_text())


def pair(prefix):
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]


def megatron_pair(prefix, documents, dtype=np.uint16):
    """Writes token lists with Megatron's own builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in documents:
        builder.add_document(torch.tensor([*ids, END]), [len(ids) + 1])
    builder.finalize(f"{prefix}.idx")
    return pair(prefix)


@pytest.mark.parametrize("engine", ["auto", "fastokens", "tokenizers"])
@pytest.mark.parametrize("mode", ["as_text", "as_special"])
def test_pair_is_byte_for_byte_megatrons(
    smoke_shard, tokenizer_folder, convert, parquet, tmp_path, engine, mode
):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = pd.read_parquet(smoke_shard)["text"].tolist()
    texts[::50] = ["a <|endoftext|> b<|im_end|>"] * len(texts[::50])
    ids = tokenizer(texts, split_special_tokens=mode == "as_text").input_ids

    options = "--tokenizer-engine", engine, "--special-tokens-in-text", mode
    ours = convert(parquet(texts), *options, "--batch-size", "17")

    assert pair(ours) == megatron_pair(tmp_path / "theirs", ids)
    assert sidecar(ours)["engine"] == engine.replace("auto", "fastokens")
    assert sidecar(ours)["special_token_text"] >= 2 * len(texts[::50])


@pytest.mark.parametrize(
    "special_tokens", [["<|a|>", "<|b|>"], ["<s>", "[a]"], ["<|a|>"], ["(*"], []]
)
@given(texts=st.lists(st.text("<|ab>s[](*", max_size=20)))
def test_special_tokens_in_texts_are_counted(special_tokens, texts):
    counts = [text.count(token) for text in texts for token in special_tokens]
    assert occurrences(special_tokens, texts) == sum(counts)


def test_of_nested_special_tokens_the_longest_counts():
    assert occurrences(["<a", "<a>", "<ab>"], ["<a> <ab> <a", "a>"]) == 3


def test_megatron_reads_what_pandas_reads(smoke_shard, tokenizer_folder, convert):
    prefix = convert(smoke_shard)
    rows = pd.read_parquet(smoke_shard)
    dataset = IndexedDataset(str(prefix))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert len(dataset) == len(rows)
    for document in (0, 7, len(rows) - 1):
        assert tokenizer.decode(dataset[document][:-1]) == rows["text"][document]
        assert dataset[document][-1] == tokenizer.eos_token_id
    assert np.array_equal(np.load(f"{prefix}.rank.npy"), rows["rank"])


def test_sidecar_says_what_the_shard_holds(smoke_shard, convert):
    prefix = convert(smoke_shard, "--end-of-document", "1023")
    said = sidecar(prefix)
    dataset = IndexedDataset(str(prefix))
    rows = pd.read_parquet(smoke_shard)
    assert said["tokens"] == dataset.sequence_lengths.sum()
    assert said["rows"] == said["documents"] == len(rows)
    assert said["end_of_document_id"] == dataset[0][-1] == 1023
    assert said["rank"] == {"min": rows["rank"].min(), "max": rows["rank"].max(), "missing": 0}
    assert said["source"]["bytes"] == smoke_shard.stat().st_size
    assert said["bin"]["bytes"] == 2 * said["tokens"]


def test_rows_without_text_are_skipped_with_their_ranks(convert, parquet, capsys):
    path = parquet(["a", None, "", "b"], rank=[4.0, 3.0, 2.0, None])
    prefix = convert(path)
    assert sidecar(prefix)["skipped"] == {"null": 1, "empty": 1}
    assert sidecar(prefix)["rank"] == {"min": 4.0, "max": 4.0, "missing": 1}
    assert np.array_equal(np.load(f"{prefix}.rank.npy"), [4.0, np.nan], equal_nan=True)
    said = capsys.readouterr().out
    assert "skipped: {'null': 1, 'empty': 1}" in said
    assert "warning: 1 documents have no rank" in said


@pytest.mark.parametrize("texts", [[], [None, ""]], ids=["no rows", "no text"])
def test_nothing_to_convert_is_a_valid_empty_shard_and_a_warning(
    convert, parquet, capsys, tmp_path, texts
):
    prefix = convert(parquet(pa.array(texts, pa.string())))
    assert pair(prefix) == megatron_pair(tmp_path / "theirs", [])
    assert len(IndexedDataset(str(prefix), mmap=False)) == 0  # Megatron cannot map an empty file
    assert "warning: part-00000.parquet holds no documents" in capsys.readouterr().out


def test_ids_that_do_not_fit_uint16_are_stored_as_int32(
    tokenizer_folder, convert, parquet, tmp_path
):
    definition = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    definition["model"]["vocab"]["a"] = 70_000  # a gap: still 1,024 tokens
    (tmp_path / "gap").mkdir()
    (tmp_path / "gap/tokenizer.json").write_text(json.dumps(definition))
    prefix = convert(parquet(["a"]), "--tokenizer-model", str(tmp_path / "gap"))
    assert sidecar(prefix)["dtype"] == "int32"
    dataset = IndexedDataset(str(prefix))
    assert dataset[0].tolist() == [70_000, END]


def test_a_document_of_a_hundred_megabytes(smoke_shard, convert, parquet):
    page = "\n".join(pd.read_parquet(smoke_shard)["text"])
    text = page * (100_000_000 // len(page) + 1)
    prefix = convert(parquet(["before", text, "after"]))
    alone = convert(parquet([page + page[:1000]], name="page"))
    dataset, reference = IndexedDataset(str(prefix)), IndexedDataset(str(alone))
    assert len(dataset) == 3
    assert dataset.get(1, length=10_000).tolist() == reference.get(0, length=10_000).tolist()
    assert dataset[2].tolist()[-1] == END


class TestEngines:
    @pytest.fixture
    def wrong_on_the_letter_w(self, monkeypatch):
        right = FastokensEngine.encode
        monkeypatch.setattr(
            FastokensEngine,
            "encode",
            lambda self, texts: right(self, [text.replace("ŵ", "w") for text in texts]),
        )

    def test_auto_converts_the_whole_shard_again_after_a_difference(
        self, convert, parquet, wrong_on_the_letter_w, capsys
    ):
        path = parquet(["ŵ" if row == 4_999 else "right" for row in range(6_000)])
        prefix = convert(path)
        said = sidecar(prefix)
        assert said["engine"] == "tokenizers"
        assert "row 4999: 'ŵ' is" in said["fell_back"]
        assert "warning: tokenizers was used, since fastokens" in capsys.readouterr().out
        assert pair(prefix) == pair(
            convert(
                path, "--tokenizer-engine", "tokenizers", "--output-prefix-prefix", "again"
            ).with_name("again_part-00000_text_document")
        )

    def test_an_explicit_fast_engine_that_differs_is_an_error(
        self, convert, parquet, wrong_on_the_letter_w, tmp_path
    ):
        with pytest.raises(SystemExit, match=r"error: fastokens .* differs .*, row 1: 'ŵ' is"):
            convert(parquet(["a", "ŵ"]), "--tokenizer-engine", "fastokens")
        assert list((tmp_path / "out").iterdir()) == []

    def test_auto_does_without_an_engine_that_cannot_load(self, convert, parquet, monkeypatch):
        monkeypatch.setitem(sys.modules, "fastokens", None)
        said = sidecar(convert(parquet(["a"])))
        assert said["engine"] == "tokenizers"
        assert "fastokens cannot load" in said["fell_back"]

    def test_auto_does_without_an_engine_that_fails_midway(self, convert, parquet, monkeypatch):
        right = FastokensEngine.encode

        def fail(self, texts):
            if "bad" in texts:
                raise EngineError("fastokens failed: backtracking limit")
            return right(self, texts)

        monkeypatch.setattr(FastokensEngine, "encode", fail)
        said = sidecar(convert(parquet(["a", "bad"]), "--batch-size", "1"))
        assert (said["engine"], said["documents"]) == ("tokenizers", 2)
        assert said["fell_back"] == "fastokens failed: backtracking limit"


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--end-of-document", "<eos>"], "'<eos>' is no token of"),
            (["--tokenizer-model", "/nowhere"], r"/nowhere/tokenizer.json is missing"),
            (["--text-key", "content"], "has no single column 'content'; it has: text"),
        ],
    )
    def test_say_what_is_wrong_and_leave_nothing(self, convert, parquet, tmp_path, options, said):
        with pytest.raises(SystemExit, match=f"error: .*{said}"):
            convert(parquet(["a"]), *options)
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())

    def test_files_that_would_become_one_shard_are_refused(self, command, parquet, tmp_path):
        (tmp_path / "other").mkdir()
        with pytest.raises(SystemExit, match=r"several files of that name would become .*\.bin"):
            main(command(parquet(["a"]), parquet(["b"], "other/part-00000")))

    def test_a_file_that_grows_while_it_is_read_is_refused(
        self, convert, parquet, monkeypatch, tmp_path
    ):
        path = parquet(["a"])
        right = FastokensEngine.encode

        def encode(self, texts):
            if texts == ["a"]:
                path.write_bytes(path.read_bytes() + b" ")
            return right(self, texts)

        monkeypatch.setattr(FastokensEngine, "encode", encode)
        with pytest.raises(SystemExit, match="changed while it was read"):
            convert(path)
        assert list((tmp_path / "out").iterdir()) == []


class TestCrashes:
    def run_and_die_at(self, place, command):
        """Runs the converter in a process that kills itself where it would call `place`."""
        module, name = place.rsplit(".", 1)
        program = (
            f"import os, sys, {module} as module"
            "\nfrom scripts.data import convert_phase_to_megatron"
            f"\nmodule.{name} = lambda *_: os.kill(os.getpid(), 9)"
            f"\nconvert_phase_to_megatron.main(sys.argv[1:])"
        )
        done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True)
        assert done.returncode == -signal.SIGKILL

    @pytest.mark.parametrize(
        "place", ["scripts.data.conversion.index_bytes", "scripts.data.shard_files.sync"]
    )
    def test_kill_leaves_no_shard_and_the_next_run_no_litter(
        self, command, convert, parquet, tmp_path, place
    ):
        path = parquet(["some text"] * 1000, rank=np.arange(1000.0))
        self.run_and_die_at(place, command(path))
        left = [path.suffix for path in (tmp_path / "out").iterdir()]
        assert left
        assert set(left) == {".partial", ".lock"}
        prefix = convert(path)
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == [prefix.name + end for end in (".bin", ".idx", ".json", ".rank.npy")]

    def test_a_new_version_without_ranks_leaves_no_old_ranks(self, convert, parquet):
        prefix = convert(parquet(["a"], rank=[1.0]))
        convert(parquet(["b"]))
        assert not prefix.with_name(prefix.name + ".rank.npy").exists()
        assert sidecar(prefix)["rank"] is None

    def test_a_second_process_on_a_shard_is_refused(self, convert, parquet, tmp_path):
        (tmp_path / "out").mkdir()
        lock = tmp_path / "out" / "phase3_part-00000_text_document.lock"
        with (
            locked(lock, "busy"),
            pytest.raises(SystemExit, match=r"another process is writing .*part-00000"),
        ):
            convert(parquet(["a"]))
        convert(parquet(["a"]))
        assert not lock.exists()

    def test_processes_that_race_for_a_shard_leave_one_whole_shard(
        self, command, parquet, tmp_path
    ):
        path = parquet(["some text"] * 1000)
        racers = [
            subprocess.Popen([sys.executable, "-m", convert_phase_to_megatron.__name__, *arguments])
            for arguments in [command(path)] * 3
        ]
        assert 0 in [racer.wait() for racer in racers]
        names = sorted(file.suffix for file in (tmp_path / "out").iterdir())
        assert names == [".bin", ".idx", ".json"]

    def test_a_full_disk_is_a_clear_error_and_leaves_nothing(self, command, parquet, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(out)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("cannot mount a small file system here")
        try:
            with pytest.raises(SystemExit, match=r"No space left on device; nothing was left"):
                main(command(parquet([f"text {i}" * 50 for i in range(5000)])))
            assert list(out.iterdir()) == []
        finally:
            subprocess.run(["umount", str(out)], check=True)


class TestSeveralFiles:
    def test_threads_give_the_same_shards(self, command, parquet, tmp_path):
        paths = [parquet([f"{n} {i} text" * i for i in range(300)], f"part-{n}") for n in range(4)]
        main(command(*paths))
        alone = shard_bytes(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
        many = "--num-shards", "3", "--workers-per-shard", "4", "--batch-size", "7"
        main(command(*paths, options=many))
        assert len(alone) == 8
        assert alone == shard_bytes(tmp_path / "out")

    def test_each_shard_is_there_before_the_next_is_begun(
        self, command, parquet, monkeypatch, tmp_path
    ):
        right, there = FastokensEngine.encode, {}

        def encode(self, texts):
            there[texts[0]] = {path.name for path in (tmp_path / "out").glob("*.idx")}
            return right(self, texts)

        monkeypatch.setattr(FastokensEngine, "encode", encode)
        main(command(parquet(["first"], "a"), parquet(["second"], "b")))
        assert there["first"] == set()
        assert there["second"] == {"phase3_a_text_document.idx"}

    def test_bad_files_do_not_keep_others_from_being_converted(self, command, parquet, tmp_path):
        bad = [tmp_path / "bad.parquet", tmp_path / "worse.parquet"]
        for path in bad:
            path.write_bytes(b"PAR1 nothing PAR1")
        with pytest.raises(SystemExit) as exit_:
            main(command(parquet(["a"], "first"), *bad, parquet(["b"], "last")))
        said = str(exit_.value).splitlines()
        assert [line.split(" is not a readable")[0] for line in said] == [
            f"error: {p}" for p in bad
        ]
        names = sorted(path.stem for path in (tmp_path / "out").glob("*.idx"))
        assert names == ["phase3_first_text_document", "phase3_last_text_document"]

    def test_those_that_are_up_to_date_are_kept(self, command, parquet, tmp_path, capsys):
        paths = [parquet([name], name) for name in ("whole", "torn", "changed", "touched")]
        main(command(*paths))
        before = {path: path.stat().st_ino for path in (tmp_path / "out").glob("*.bin")}
        (tmp_path / "out/phase3_torn_text_document.bin").write_bytes(b"")
        times = paths[2].stat().st_atime_ns, paths[2].stat().st_mtime_ns
        parquet(["CHANGED"], "changed")
        os.utime(paths[2], ns=times)
        paths[3].touch()
        main(command(*paths, parquet(["new"], "new")))
        kept = {
            path.name.split("_")[1] for path, inode in before.items() if path.stat().st_ino == inode
        }
        assert kept == {"whole", "touched"}
        assert "2 of 5 shards are there already" in capsys.readouterr().out
        assert len(list((tmp_path / "out").glob("*.idx"))) == 5

    @pytest.mark.parametrize(
        "options", [["--end-of-document", "1023"], ["--special-tokens-in-text", "as_special"]]
    )
    def test_other_settings_make_them_again(self, command, parquet, tmp_path, options):
        path = parquet(["a<|endoftext|>"])
        main(command(path))
        before = shard_bytes(tmp_path / "out")
        main(command(path, options=options))
        assert shard_bytes(tmp_path / "out") != before

    def test_nothing_to_do_loads_no_tokenizer(self, command, parquet, monkeypatch):
        path = parquet(["a"])
        main(command(path))
        monkeypatch.delattr(convert_phase_to_megatron, "tokenization")
        main(command(path))


def shard_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.[bi]*")}


def test_a_folder_is_converted_with_the_original_command_line(tokenizer_folder, parquet, tmp_path):
    parquet(["a"], "part-00000")
    parquet(["b"], "part-00001")
    main(
        f"--input-dir {tmp_path} --output-dir {tmp_path}/out --megatron-dir Megatron-LM"
        f" --tokenizer-model {tokenizer_folder} --text-key text --output-prefix-prefix phase1"
        " --num-shards 2 --workers-per-shard 2 --batch-size 10 --chunksize 32".split()
    )
    names = sorted(path.name for path in (tmp_path / "out").glob("*.bin"))
    assert names == [f"phase1_part-0000{n}_text_document.bin" for n in (0, 1)]


def test_forked_children_can_tokenize_after_us(convert, parquet, tokenizer_folder):
    convert(parquet(["a"] * 100))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_tokens, (tokenizer_folder,)).get(timeout=60) == [END]


def _tokens(folder):
    return AutoTokenizer.from_pretrained(folder)("<|endoftext|>").input_ids
