"""Tables of the page that the smoke run cannot show: several results, other verdicts."""

from scripts.report import tables
from scripts.report.page import flat, numeric_columns


def test_samples_stand_beside_each_other_by_iteration():
    later = {"iteration": 20, "continuations": [{"prompt": "A", "continuation": "b"}]}
    earlier = {"iteration": 3, "continuations": [{"prompt": "A", "continuation": "x"}]}
    assert tables.sample_rows(flat([later, [earlier]])) == [
        {"prompt": "A", "iteration 3": "x", "iteration 20": "b"}
    ]


def test_benchmarks_stand_above_the_published_averages():
    summary = {
        "tasks": {"arc_easy": {"metric": "acc_norm", "score": 41.234}},
        "average": 41.234,
        "published_averages": {"Kaiyuan-2B": 59.07},
    }
    rows = tables.benchmark_rows(summary)
    assert [(row["model"], row["score"]) for row in rows] == [
        ("this one", "41.23"),
        ("this one", "41.23"),
        ("Kaiyuan-2B", "59.07"),
    ]


def test_an_export_that_differs_is_named_different():
    text = {"name": "english", "tokens": 8, "max_abs_error": 3.0, "argmax_agreement": 0.5}
    rows = tables.verdict_rows({"texts": [text | {"passed": False}]})
    assert rows[0]["verdict"] == "DIFFERENT"


def test_columns_that_say_nothing_are_left_out():
    rows = [{"a": "1", "b": ""}, {"a": "2", "b": ""}]
    assert tables.without_empty_columns(rows) == [{"a": "1"}, {"a": "2"}]


def test_numbers_are_told_from_words():
    rows = [{"n": "1,234", "bytes": "1.2MB", "word": "rank", "share": "41.0%"}]
    assert numeric_columns(rows) == {"n", "bytes", "share"}
