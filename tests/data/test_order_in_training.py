"""The proof of the order: tokens as the forward steps of the real training loop receive them.

One run on the CPU: phase 1, ordered by rank, begins on two ranks, is stopped and resumed on one;
phase 2 is shuffled. What the ranks wrote down is compared with pandas' sort.
"""

import json
import os
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scripts.common.settings import load_parameters, phase_recipe
from scripts.data import lineage
from scripts.data.phase_index import build_index
from scripts.data.phase_order import random_bits
from scripts.data.phase_reader import read_index
from scripts.train import launch, ranks
from tests.data.phase_corpus import TOKENIZER, random_shards, write_phase

SEQUENCE, BATCH, STOP_AFTER = 32, 8, 4
HELD_OUT = 0.2
ORDERS = ("rank", "shuffled")
RUNTIME = {"gpus": 0, "micro_batch_size": 2, "checkpoint_interval": 100}


def parameters():
    """Returns those of the smallest model, for a phase of each order."""
    result = load_parameters("cpu_smoke")
    result["hparams"] |= {
        "sequence_length": SEQUENCE,
        "global_batch_size": BATCH,
        "validation": {"interval": 5, "samples": BATCH},
        "learning_rate": {"initial": 1.0e-3, "phases": [[{"shape": "linear", "to": 1.0e-4}]] * 2},
    }
    result["data"]["phases"] = [{"order": order, "length": "one_pass"} for order in ORDERS]
    return result


def train(folder, phase, cpu_ranks, stop_after=0):
    """Starts the launcher; returns its exit code."""
    os.environ |= {"RECORD_DIR": str(folder / f"phase{phase}"), "STOP_AFTER": str(stop_after)}
    arguments = {
        "phase": phase,
        "index": folder / f"megatron_phase{phase}.index.json",
        "train-name": "proof",
        "tokenizer": folder,
        "artifacts": folder,
        "marker": folder / f"run_state/proof/phase{phase}.json",
        "recipe": json.dumps(phase_recipe(parameters(), phase)),
        "runtime": json.dumps(RUNTIME | {"cpu_ranks": cpu_ranks}),
    }
    with pytest.raises(SystemExit) as ended:
        launch.main(
            [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        )
    return ended.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains both phases; returns the folder and, for each phase, its documents as a table."""
    folder, tables = tmp_path_factory.mktemp("proof"), {}
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    ranks.MODULE, original = "tests.data.record_batches", ranks.MODULE
    for phase, order in enumerate(ORDERS, start=1):
        shards = random_shards(phase, [80, 0, 60, 60], longest=30)
        manifest = write_phase(folder, shards, phase)
        output = folder / f"megatron_phase{phase}.index.json"
        settings = {"seed": 1, "sequence_length": SEQUENCE, "validation_fraction": HELD_OUT}
        build_index(manifest, output, order=order, **settings)
        (folder / f"phase{phase}").mkdir()
        tables[phase] = pd.concat(
            pd.DataFrame({"tokens": s.documents, "rank": s.ranks}).assign(
                held_out=random_bits(f"validation {name}", 0, len(s.documents)) < HELD_OUT * 2**64
            )
            for name, s in zip(manifest.shards, shards, strict=True)
        )
    assert train(folder, 1, cpu_ranks=2, stop_after=STOP_AFTER) != 0
    assert train(folder, 1, cpu_ranks=1) == 0
    assert train(folder, 2, cpu_ranks=1) == 0
    ranks.MODULE = original
    return folder, tables


def received(folder, phase, kind="train"):
    """Returns {iteration: tokens [samples, sequence]} as the ranks got them."""
    files = sorted((folder / f"phase{phase}").glob(f"{kind}_*.npy"))
    by_iteration = groupby(files, lambda file: int(file.name.split("_")[1]))
    return {i: np.concatenate([np.load(file) for file in of_i]) for i, of_i in by_iteration}


def test_rank_order_reaches_the_forward_steps_across_a_stop_and_another_number_of_ranks(run):
    folder, tables = run
    batches = received(folder, 1)
    files = [path.name for path in (folder / "phase1").glob("train_*")]
    assert {name[-5] for name in files if int(name[6:11]) <= STOP_AFTER} == {"0", "1"}
    assert {name[-5] for name in files if int(name[6:11]) > STOP_AFTER} == {"0"}
    table = tables[1]
    sorted_documents = table[~table.held_out].sort_values("rank", kind="stable").tokens
    expected = np.concatenate(sorted_documents.tolist())
    actual = np.concatenate(list(batches.values()))
    assert list(batches) == list(range(1, len(expected) // (SEQUENCE * BATCH) + 1))
    assert all(batch.shape == (BATCH, SEQUENCE) for batch in batches.values())
    np.testing.assert_array_equal(actual.ravel(), expected[: actual.size])


def test_a_shuffled_phase_trains_on_each_token_once_and_not_in_the_stored_order(run):
    folder, tables = run
    batches = received(folder, 2)
    trained = np.concatenate(list(batches.values())).ravel()
    assert min(batches) == max(received(folder, 1)) + 1
    of_training = np.concatenate(tables[2][~tables[2].held_out].tokens.tolist())
    ordinary = trained[trained != 0]  # 0 ends every document, all other tokens are unique
    assert len(np.unique(ordinary)) == len(ordinary)
    assert np.isin(ordinary, of_training).all()
    assert 0 <= len(of_training) - len(trained) < SEQUENCE * (BATCH + 1)
    assert np.mean(np.diff(ordinary) < 0) > 0.02


def test_every_evaluation_reads_the_same_documents_that_were_held_out(run):
    folder, tables = run
    held_out = tables[1][tables[1].held_out].sort_values("rank", kind="stable").tokens
    expected = np.concatenate(held_out.tolist())[: SEQUENCE * BATCH]
    evaluations = received(folder, 1, "valid")
    assert evaluations
    for tokens in evaluations.values():
        once = tokens.reshape(-1, BATCH * SEQUENCE)  # the last iteration evaluates twice
        np.testing.assert_array_equal(once, np.tile(expected, (len(once), 1)))


def test_lineage_of_a_checkpoint_agrees_with_what_was_received(run, capsys):
    folder, _ = run
    batches = received(folder, 1), received(folder, 2)
    last = max(batches[1])
    checkpoint = Path(folder, "checkpoints", "proof", f"iter_{last:07d}")
    arguments = f"--checkpoint {checkpoint} --converted-dir {folder} --tokenizer {folder}"
    lineage.main([*arguments.split(), "--global-batch-size", str(BATCH), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for phase, line in enumerate(lines, start=1):
        tokens = np.concatenate(list(batches[phase - 1].values())).size
        index = read_index(folder / f"megatron_phase{phase}.index.json")
        assert line["tokens"] == tokens
        assert line["documents"] == lineage.consumed(index, tokens // SEQUENCE)["documents"]
        assert sum(line["documents_per_shard"].values()) == line["documents"]
        marker = json.loads((folder / f"run_state/proof/phase{phase}.json").read_text())
        assert marker["consumed"].items() <= line.items()
    assert len(lines) == 2
