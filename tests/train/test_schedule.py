"""The learning rate of a run, piece by piece."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.common.settings import load_parameters
from scripts.train.schedule import phase_pieces, rate_at

TABLE = {
    "initial": 0.0,
    "phases": [
        [{"shape": "linear", "to": 5e-3, "iterations": 10}, {"shape": "constant"}],
        [{"shape": "cosine", "to": 3e-3, "iterations": 20}, {"shape": "constant"}],
        [{"shape": "1-sqrt", "to": 6e-4}],
    ],
}


def rates(table, phase, first, last):
    pieces = phase_pieces(table, phase, first, last)
    return [rate_at(pieces, iteration) for iteration in range(first, last + 1)]


def test_warm_up_reaches_the_peak_at_its_last_iteration_and_stays():
    assert rates(TABLE, 1, 1, 15) == pytest.approx(
        [5e-4 * step for step in range(1, 11)] + [5e-3] * 5
    )


def test_a_phase_goes_on_from_the_rate_where_the_one_before_ended():
    cosine = [
        3e-3 + (5e-3 - 3e-3) * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(1, 21)
    ]
    assert rates(TABLE, 2, 101, 130) == pytest.approx(cosine + [3e-3] * 10)


def test_the_last_decay_follows_one_minus_the_square_root():
    expected = [6e-4 + (3e-3 - 6e-4) * (1 - math.sqrt(step / 50)) for step in range(1, 51)]
    assert rates(TABLE, 3, 131, 180) == pytest.approx(expected)


def test_a_phase_beyond_the_table_keeps_the_last_rate():
    assert rates(TABLE, 4, 181, 190) == [6e-4] * 10


def test_a_constant_piece_with_a_rate_jumps_to_it():
    table = {"initial": 1.0, "phases": [[{"shape": "constant", "to": 0.25}]]}
    assert rates(table, 1, 1, 3) == [0.25] * 3


def test_pieces_longer_than_the_phase_are_refused_with_both_numbers():
    with pytest.raises(
        ValueError, match=r"phase 1: the pieces have 10 iterations, the phase has 5"
    ):
        phase_pieces(TABLE, 1, 1, 5)


def test_pieces_that_leave_a_rest_are_refused():
    table = {"initial": 0.0, "phases": [[{"shape": "linear", "to": 1.0, "iterations": 3}]]}
    with pytest.raises(ValueError, match="3 iterations, the phase has 4"):
        phase_pieces(table, 1, 1, 4)


def test_two_pieces_without_iterations_are_refused():
    table = {"initial": 0.0, "phases": [[{"shape": "constant"}, {"shape": "constant"}]]}
    with pytest.raises(ValueError, match="only one piece"):
        phase_pieces(table, 1, 1, 4)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    shapes=st.lists(st.sampled_from(["linear", "cosine", "1-sqrt", "constant"]), min_size=6),
    targets=st.lists(st.floats(1e-6, 1e-2), min_size=6),
    start=st.integers(0, 10_000),
)
def test_pieces_cover_each_iteration_once_and_end_at_their_rate(lengths, shapes, targets, start):
    table = {
        "initial": 0.0,
        "phases": [
            [
                {"shape": shape, "to": to, "iterations": length}
                for length, shape, to in zip(lengths, shapes, targets, strict=False)
            ]
        ],
    }
    last = start + sum(lengths)
    pieces = phase_pieces(table, 1, start + 1, last)
    covered = [i for piece in pieces for i in range(piece.first, piece.last + 1)]
    assert covered == list(range(start + 1, last + 1))
    for piece, to in zip(pieces, targets, strict=False):
        assert piece.rate(piece.last) == pytest.approx(to)
        low, high = sorted((piece.start, piece.to))
        slack = 1e-12
        assert all(
            low - slack <= piece.rate(i) <= high + slack for i in range(piece.first, piece.last + 1)
        )


def test_the_main_model_has_the_published_rates():
    table = load_parameters("qwen3_1p7b")["hparams"]["learning_rate"]
    ends = [rates(table, phase, 1, 50_000)[-1] for phase in range(1, 6)]
    assert ends == [5e-3, 3e-3, 3e-3, 3e-3, 6e-4]
