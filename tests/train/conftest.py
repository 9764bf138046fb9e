"""Data and a finished run that several tests read."""

from pathlib import Path

import pytest

from tests.train.small_run import SmallRun, write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and indices of two phases; tests must not change them."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A run that was never interrupted; tests must not change it."""
    run = SmallRun(data, tmp_path_factory.mktemp("finished"))
    for phase in (1, 2):
        code, output = run.launch(phase)
        assert code == 0, output + (run.run.logs / "small.log").read_text()[-3000:]
    return run
