import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from scripts.data.make_smoke_corpus import main

SHARDS = 2


def make(path, phase, shard, shards=SHARDS):
    main(f"--phase {phase} --shard {shard} --shards-per-phase {shards} --output {path}".split())
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return {
        (phase, shard): make(folder / f"phase{phase}/part-{shard:05}.parquet", phase, shard)
        for phase in range(1, 6)
        for shard in range(SHARDS)
    }


def test_every_document_is_in_one_shard_of_one_phase(corpus):
    texts = pd.concat(pd.read_parquet(path) for path in corpus.values())["text"]
    assert texts.is_unique
    assert len(texts) > 1000


def test_every_shard_holds_about_a_megabyte_of_real_text(corpus):
    for path in corpus.values():
        texts = pd.read_parquet(path)["text"]
        assert 0.4e6 < texts.str.len().sum() < 4e6
        assert texts.str.contains("def |class |import |The ").mean() > 0.5


def test_ranks_are_spread_over_the_shards_and_not_sorted_in_them(corpus):
    for phase in (3, 4, 5):
        shards = [pd.read_parquet(corpus[phase, shard]) for shard in range(SHARDS)]
        ranks = [shard["rank"].to_numpy() for shard in shards]
        assert all(r.dtype == np.float64 and (np.diff(r) < 0).any() for r in ranks)
        assert max(r.min() for r in ranks) < 0.1
        assert min(r.max() for r in ranks) > 0.9


def test_the_mix_of_sources_is_constant_along_the_rank(corpus):
    rows = pd.concat(pd.read_parquet(corpus[3, shard]) for shard in range(SHARDS))
    code = rows["text"].str.contains(r"\b(?:def|class|import)\b.*[:\n]", regex=True)
    halves = code.groupby(rows["rank"] < 0.5).mean()
    assert abs(halves[True] - halves[False]) < 0.35


def test_the_first_phases_have_only_text_and_files_are_zstd(corpus):
    assert pq.read_schema(corpus[1, 0]).names == ["text"]
    assert pq.read_schema(corpus[3, 0]).names == ["text", "rank"]
    assert pq.read_metadata(corpus[1, 0]).row_group(0).column(0).compression == "ZSTD"


def test_the_same_command_writes_the_same_bytes(corpus, tmp_path):
    again = make(tmp_path / "again.parquet", 4, 1)
    assert again.read_bytes() == corpus[4, 1].read_bytes()


@pytest.mark.parametrize(
    "arguments", ["--phase 6 --shard 0", "--phase 0 --shard 0", "--phase 1 --shard 2"]
)
def test_places_that_do_not_exist_are_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(f"{arguments} --shards-per-phase 2 --output {tmp_path}/x.parquet".split())
    assert exit_.value.code == 2
    assert "must lie between" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
