import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.report.workflow_graph import diagram, direct, insert, stages

FORWARD = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda edge: edge[0] < edge[1])


@settings(deadline=None)
@given(st.sets(FORWARD, max_size=30))
def test_arrows_that_follow_from_others_are_left_out(edges):
    names = {(str(first), str(second)) for first, second in edges}
    assert direct(names) == set(networkx.transitive_reduction(networkx.DiGraph(names)).edges)


def test_a_rule_that_follows_itself_keeps_its_arrow():
    assert direct({("train", "train"), ("train", "export")}) == {
        ("train", "train"),
        ("train", "export"),
    }


def test_rules_are_grouped_by_the_file_that_has_them():
    assert stages()["convert"] == "data"
    text = diagram("\tid0[convert]\n\tid1[train]\n\tid0 --> id1\n")
    assert text.splitlines() == [
        "flowchart LR",
        "  subgraph data.smk",
        "    convert",
        "  end",
        "  subgraph train.smk",
        "    train",
        "  end",
        "  convert --> train",
    ]


def test_a_page_without_a_place_for_the_graph_is_refused():
    with pytest.raises(ValueError, match="no place"):
        insert("# page", "flowchart LR")
