"""A small corpus and tokenizer, made once per session by the scripts of the smoke run."""

import pytest

from scripts.data import make_smoke_corpus, train_smoke_tokenizer


@pytest.fixture(scope="session")
def smoke_shard(tmp_path_factory):
    """Phase 3's second shard: text and ranks."""
    path = tmp_path_factory.mktemp("corpus") / "phase3" / "part-00001.parquet"
    make_smoke_corpus.main(f"--phase 3 --shard 1 --shards-per-phase 2 --output {path}".split())
    return path


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory, smoke_shard):
    """A tokenizer of Qwen2's kind with 1,024 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_smoke_tokenizer.main(
        f"--input {smoke_shard} --vocab-size 1024 --output-dir {folder}".split()
    )
    return folder
