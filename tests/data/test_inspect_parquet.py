import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.data.inspect_parquet import main
from scripts.data.inspection import inspect_file, scripts

TEXTS = ["the same"] * 3 + [None, "", "x <|im_end|><|im_end|>", "中文字" * 40, "Привет"]


@pytest.fixture
def folder(tmp_path):
    """A phase of two files, with ranks."""
    for number in range(2):
        table = {"text": TEXTS, "rank": np.arange(len(TEXTS))[::-1] + number / 2}
        path = tmp_path / f"part-{number:05}.parquet"
        pq.write_table(pa.table(table), path, row_group_size=3, compression="zstd")
    return tmp_path


def run(folder, *options):
    main(["--input-dir", str(folder), "--output-dir", f"{folder}/out", "--workers", "1", *options])


def read(folder, name):
    return json.loads((folder / "out" / f"{name}.json").read_text())


def test_report_agrees_with_pandas(folder):
    run(folder)
    report = read(folder, "part-00000")
    rows = pd.read_parquet(folder / "part-00000.parquet")
    texts = rows["text"][rows["text"].notna() & (rows["text"] != "")]
    assert report["rows"] == len(rows)
    assert report["null"] == report["statistics"]["null"] == rows["text"].isna().sum()
    assert report["empty"] == 1
    assert report["documents"] == len(texts)
    assert report["characters"] == texts.str.len().sum()
    assert report["length"]["median"] == texts.str.len().median()
    assert report["length"]["max"] == texts.str.len().max()
    assert report["duplicates"] == texts.duplicated().sum()
    assert report["special_token_text"] == {"<|im_end|>": 2}
    assert report["row_groups"] == {"number": 3, "fewest_rows": 2, "most_rows": 3}
    assert report["text_codecs"] == ["ZSTD"]
    assert report["schema"] == {"text": "string", "rank": "double"}
    assert report["rank"] == {
        "missing": 0, "min": 0.0, "max": 7.0, "ties": 0, "ascending": False,
    }  # fmt: skip


def test_summary_sees_what_lies_in_different_files(folder, capsys):
    run(folder)
    summary = read(folder, "summary")
    assert (summary["files"], summary["rows"], summary["documents"]) == (2, 16, 12)
    assert summary["duplicates"] == 8
    assert summary["rank"]["ties"] == 0
    assert summary["problems"] == []
    said = capsys.readouterr().out
    assert "part-00001.parquet" in said
    assert "2 files, 16 rows" in said
    assert "0.5 … 7.5" in said


def test_several_processes_find_the_same(folder, capsys):
    run(folder)
    alone = read(folder, "part-00000"), read(folder, "summary"), capsys.readouterr().out
    run(folder, "--workers", "2")
    assert (read(folder, "part-00000"), read(folder, "summary"), capsys.readouterr().out) == alone


def test_metadata_alone_gives_rows_nulls_and_rank_ranges(folder, capsys):
    run(folder, "--metadata-only")
    report = read(folder, "part-00001")
    assert report["statistics"] == {"null": 1, "rank_min": 0.5, "rank_max": 7.5}
    assert "documents" not in report
    assert "0.5 … 7.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": pa.array([b"\xff", b"a"]).cast(pa.binary())}, "1 documents are not valid UTF-8"),
        ({"text": pa.array([None, ""], pa.string())}, "no documents"),
        ({"text": ["a", "b"], "rank": [1.0, None]}, "1 documents have no rank"),
        ({"text": ["a", "b"], "rank": [1.0, 1.0]}, "all ranks are equal"),
        ({"content": ["a"]}, "has no single column 'text'; it has: content"),
    ],
)
def test_problems_are_named_and_fail(tmp_path, columns, said):
    pq.write_table(pa.table(columns), tmp_path / "part-00000.parquet")
    with pytest.raises(SystemExit, match=f"problem: .*part-00000.parquet.*{said}"):
        run(tmp_path)
    assert said in read(tmp_path, "summary")["problems"][0]


def test_an_unreadable_file_does_not_hide_the_others(folder):
    (folder / "part-00002.parquet").write_bytes(b"PAR1")
    with pytest.raises(SystemExit, match=r"part-00002.parquet is not a readable Parquet file"):
        run(folder)
    assert read(folder, "summary")["rows"] == 16


def test_a_file_without_ranks_among_others_is_a_problem(folder):
    pq.write_table(pa.table({"text": ["a"]}), folder / "part-00002.parquet")
    with pytest.raises(SystemExit, match=r"1 of 3 files have no rank, such as part-00002.parquet"):
        run(folder)


def test_a_file_without_rows_is_a_problem_and_not_a_crash(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    report = inspect_file(tmp_path / "x.parquet", "text", []).report
    assert report["problems"] == ["x.parquet: no documents"]
    assert report["length"] is None


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Größe ǅ ệ", "Latin"),
        ("Ελληνικά ἀρχή", "Greek"),
        ("Привет", "Cyrillic"),
        ("中文字符𠀀", "Han"),
        ("ひらがなカタカナ", "Kana"),
        ("한국어", "Hangul"),
        ("שלום", "Hebrew"),
        ("مرحبا", "Arabic"),
        ("नमस्ते தமிழ்", "Indic"),
        ("สวัสดี", "Thai, Lao, Tibetan"),
    ],
)
def test_letters_are_counted_by_script(text, script):
    assert dict(scripts(f"{text} 123 .,!? 😀")) == {script: len(text.replace(" ", ""))}
