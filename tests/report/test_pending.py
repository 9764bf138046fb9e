"""What Snakemake's lines say of work that is pending."""

from pathlib import Path

import pytest

from scripts.data.shards import Phase
from scripts.report.pending import conversion_in_words


def phase_in(folder: Path, shards: int) -> tuple[Phase, list[str]]:
    """Returns a phase without files and the names of its shards."""
    names = tuple(f"part-{number:05d}" for number in range(shards))
    phase = Phase(1, str(folder / "parquet"), str(folder / "converted"), names)
    return phase, phase.shards


def test_what_is_converted_again_is_said_with_the_reason(tmp_path):
    phase, names = phase_in(tmp_path, 6)
    Path(phase.folder).mkdir(parents=True)
    for name in names[1:5]:
        Path(phase.file(name, "bin")).touch()
    stale = dict.fromkeys(names, "other content")
    assert conversion_in_words(phase, {}) == ""
    assert conversion_in_words(phase, {names[0]: "missing"}) == (
        "phase 1: 1 of 6 shards to convert"
    )
    assert conversion_in_words(phase, stale) == (
        "phase 1: 6 of 6 shards to convert, of which again: part-00001 (other content); "
        "part-00002 (other content); part-00003 (other content) and 1 more"
    )


@pytest.mark.timeout(60)  # of a fifth of a second; work that grows with their square took 70
def test_what_is_pending_of_50_000_shards_is_said(tmp_path):
    phase, names = phase_in(tmp_path, 50_000)
    stale = dict.fromkeys(names, "missing")
    assert conversion_in_words(phase, stale) == "phase 1: 50,000 of 50,000 shards to convert"
