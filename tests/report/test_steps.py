import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.report.steps import binned, read_history
from tests.report.run_files import run_of, settings_in, step, write_steps


def history_of(tmp_path, steps):
    run = run_of(settings_in(tmp_path))
    write_steps(run, steps)
    return read_history(run.step_log)


def test_the_last_line_of_an_iteration_counts(tmp_path):
    history = history_of(tmp_path, [step(1, 1.0, loss=9.0), step(1, 2.0, loss=8.0)])
    assert history.steps["loss"].to_dict() == {1: 8.0}


def test_a_crash_is_an_interruption_with_repeated_steps(tmp_path):
    steps = [step(i, float(i)) for i in (1, 2, 3, 4, 5, 4, 5, 6)]
    (stop,) = history_of(tmp_path, steps).interruptions
    assert (stop.iteration, stop.repeated) == (3, 2)


def test_a_clean_stop_is_an_interruption_without_repeated_steps(tmp_path):
    steps = [step(1, 1.0), step(2, 2.0), step(3, 90.0, mean_seconds=1.0), step(4, 91.0)]
    (stop,) = history_of(tmp_path, steps).interruptions
    assert (stop.iteration, stop.repeated) == (2, 0)


def test_a_new_phase_is_no_interruption(tmp_path):
    steps = [step(1, 1.0), step(2, 2.0, phase=2, mean_seconds=1.0)]
    assert history_of(tmp_path, steps).interruptions == []


def test_held_out_losses_are_kept_apart(tmp_path):
    line = {"iteration": 2, "phase": 1, "validation_loss": 4.5, "time": 2.0}
    history = history_of(tmp_path, [step(1, 1.0), step(2, 2.0), line])
    assert history.validation.to_dict() == {2: 4.5}
    assert len(history.steps) == 2


def test_a_log_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no training step"):
        history_of(tmp_path, [])


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_bins_cover_the_series_once(values, bins):
    series = pd.Series(values, index=np.arange(1, len(values) + 1))
    result = binned(series, bins)
    assert len(result) <= bins
    assert result["low"].min() == min(values)
    assert result["high"].max() == max(values)
