"""Which checkpoint a run goes on from, and which ones may be deleted."""

import hashlib
import json

import pytest

from scripts.train import checkpoints
from scripts.train.checkpoints import TRACKER, folder_of, prune, recover, tracked_iteration
from scripts.train.run import RunError


@pytest.fixture
def folder(tmp_path):
    def make(*iterations, tracker=None):
        for iteration in iterations:
            save(tmp_path, iteration)
        if tracker is not None:
            (tmp_path / TRACKER).write_text(str(tracker))
        return tmp_path

    return make


def save(folder, iteration):
    """Writes a checkpoint with a list of digests as Megatron's --verify-integrity does."""
    path = folder_of(folder, iteration)
    path.mkdir()
    files = {"__0_0.distcp": b"weights %d" % iteration, "common.pt": b"arguments"}
    for name, content in files.items():
        (path / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}))


def test_a_run_without_checkpoints_begins_at_zero(folder):
    recovery = recover(folder())
    assert recovery.iteration == 0
    assert recovery.messages == []


def test_a_sound_run_is_left_as_it_is(folder):
    checkpoint_folder = folder(10, 20, tracker=20)
    assert recover(checkpoint_folder) == checkpoints.Recovery(20, [])


@pytest.mark.parametrize("torn", ["", "2x", "\x00\x00", " "])
def test_a_torn_tracker_is_repaired_from_the_folders(folder, torn):
    checkpoint_folder = folder(10, 20, tracker=torn)
    recovery = recover(checkpoint_folder)
    assert recovery.iteration == 20
    assert tracked_iteration(checkpoint_folder) == 20
    assert "unreadable" in recovery.messages[0]


def test_a_missing_tracker_does_not_start_from_scratch(folder):
    checkpoint_folder = folder(10, 20)
    assert recover(checkpoint_folder).iteration == 20
    assert (checkpoint_folder / TRACKER).read_text() == "20"


def test_a_save_that_ended_before_the_tracker_was_written_is_used(folder):
    assert recover(folder(10, 20, tracker=10)).iteration == 20


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no integrity", "torn integrity"])
def test_a_broken_newest_checkpoint_is_set_aside_and_the_one_before_used(folder, damage):
    checkpoint_folder = folder(10, 20, tracker=20)
    newest = folder_of(checkpoint_folder, 20)
    if damage == "flip":
        (newest / "__0_0.distcp").write_bytes(b"weights 2O")
    elif damage == "truncate":
        (newest / "__0_0.distcp").write_bytes(b"wei")
    elif damage == "remove":
        (newest / "common.pt").unlink()
    elif damage == "no integrity":
        (newest / "integrity.json").unlink()
    else:
        (newest / "integrity.json").write_text('{"files": {"__0')
    recovery = recover(checkpoint_folder)
    assert recovery.iteration == 10
    assert tracked_iteration(checkpoint_folder) == 10
    assert not newest.exists()
    assert (checkpoint_folder / "broken_iter_0000020").is_dir()
    assert "iter_0000020 is set aside" in recovery.messages[0]


def damage(folder, *iterations):
    for iteration in iterations:
        (folder_of(folder, iteration) / "__0_0.distcp").write_bytes(b"spoilt")


def interrupt(folder, *iterations):
    for iteration in iterations:
        (folder_of(folder, iteration) / "integrity.json").unlink()


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_damage_that_a_second_reading_does_not_find_changes_nothing(folder, monkeypatch):
    checkpoint_folder = folder(10, 20, tracker=20)
    wrong = iter(["wrong"])
    sha256 = checkpoints.sha256
    monkeypatch.setattr(checkpoints, "sha256", lambda path: next(wrong, None) or sha256(path))
    assert recover(checkpoint_folder) == checkpoints.Recovery(20, [])
    assert names(checkpoint_folder) == {"iter_0000010", "iter_0000020", TRACKER}


def test_several_damaged_checkpoints_are_named_and_left_as_they_are(folder):
    checkpoint_folder = folder(10, 20, 30, 40, tracker=30)
    damage(checkpoint_folder, 20, 30)
    interrupt(checkpoint_folder, 40)
    before = names(checkpoint_folder)
    with pytest.raises(RunError) as error:
        recover(checkpoint_folder)
    assert "2 checkpoints of" in str(error.value)
    assert "\n  iter_0000030: __0_0.distcp is damaged" in str(error.value)
    assert "\n  iter_0000020: __0_0.distcp is damaged" in str(error.value)
    assert "delete or rename these folders to go on from iteration 10" in str(error.value)
    assert names(checkpoint_folder) == before
    assert tracked_iteration(checkpoint_folder) == 30


@pytest.mark.parametrize("left", ["damaged", "tracker", "set aside"])
def test_a_run_that_has_saved_never_begins_at_zero_by_itself(folder, left):
    checkpoint_folder = folder(10, tracker=10)
    if left == "damaged":
        damage(checkpoint_folder, 10)
    elif left == "tracker":
        interrupt(checkpoint_folder, 10)
    else:
        folder_of(checkpoint_folder, 10).rename(checkpoint_folder / "broken_iter_0000010")
        (checkpoint_folder / TRACKER).unlink()
    before = names(checkpoint_folder)
    with pytest.raises(RunError, match=f"delete {checkpoint_folder} to begin again") as error:
        recover(checkpoint_folder)
    assert ("iter_0000010: __0_0.distcp is damaged" in str(error.value)) == (left == "damaged")
    assert names(checkpoint_folder) == before


def test_a_run_whose_first_saves_were_cut_short_begins_at_zero(folder):
    checkpoint_folder = folder(10, 20)
    interrupt(checkpoint_folder, 10, 20)
    assert recover(checkpoint_folder).iteration == 0
    assert recover(checkpoint_folder) == checkpoints.Recovery(0, [])


def test_only_one_save_that_did_not_end_takes_room(folder):
    checkpoint_folder = folder(10, 20, 30, tracker=10)
    interrupt(checkpoint_folder, 20, 30)
    recover(checkpoint_folder)
    assert [path.name for path in checkpoint_folder.glob("broken_*")] == ["broken_iter_0000020"]


def test_damaged_checkpoints_are_kept_for_people_to_look_at(folder):
    checkpoint_folder = folder(10, 20, tracker=20)
    for _ in range(2):  # trained again, and damaged again
        damage(checkpoint_folder, 20)
        recover(checkpoint_folder)
        save(checkpoint_folder, 20)
    interrupt(checkpoint_folder, 20)
    recover(checkpoint_folder)
    aside = [path.parent.name for path in checkpoint_folder.glob("broken_*/integrity.json")]
    assert sorted(aside) == ["broken_iter_0000020", "broken_iter_0000020_again"]


def test_the_newest_ones_stay_and_older_ones_go(folder):
    checkpoint_folder = folder(10, 20, 30, 40, 50, tracker=50)
    assert prune(checkpoint_folder, 3, keep=set()) == [10, 20]
    assert checkpoints.iterations_on_disk(checkpoint_folder) == [30, 40, 50]


def test_ends_of_phases_and_checkpoints_for_averaging_stay(folder):
    checkpoint_folder = folder(10, 20, 30, 40, 50, tracker=50)
    assert prune(checkpoint_folder, 1, keep={20, 40}) == [10, 30]


def test_zero_keeps_all(folder):
    assert prune(folder(10, 20, 30, tracker=30), 0, keep=set()) == []


def test_the_newest_one_stays_whatever_is_asked_for(folder):
    checkpoint_folder = folder(10, 20, 30, tracker=30)
    prune(checkpoint_folder, -5, keep=set())
    assert checkpoints.iterations_on_disk(checkpoint_folder) == [30]


def test_what_is_newer_than_the_tracker_may_be_in_writing_and_stays(folder):
    checkpoint_folder = folder(10, 20, 30, tracker=10)
    (folder_of(checkpoint_folder, 30) / "integrity.json").unlink()
    assert prune(checkpoint_folder, 1, keep=set()) == []
    assert checkpoints.iterations_on_disk(checkpoint_folder) == [10, 20, 30]


def test_nothing_goes_while_the_tracker_cannot_be_read(folder):
    assert prune(folder(10, 20, 30, tracker=""), 1, keep=set()) == []


def test_other_folders_are_not_touched(folder):
    checkpoint_folder = folder(10, 20, tracker=20)
    for name in ("iter_0000005_mine", "iter_5", "exported", "iter_00000010"):
        (checkpoint_folder / name).mkdir()
    prune(checkpoint_folder, 1, keep=set())
    names = {path.name for path in checkpoint_folder.iterdir() if path.is_dir()}
    assert names == {"iter_0000020", "iter_0000005_mine", "iter_5", "exported", "iter_00000010"}


def test_a_removal_that_was_interrupted_is_finished(folder):
    checkpoint_folder = folder(10, 20, tracker=20)
    folder_of(checkpoint_folder, 10).rename(checkpoint_folder / "removed_iter_0000010")
    prune(checkpoint_folder, 3, keep=set())
    assert not (checkpoint_folder / "removed_iter_0000010").exists()


def test_the_main_model_has_its_published_number_of_parameters():
    from scripts.common.settings import load_parameters

    model = load_parameters("qwen3_1p7b")["model"]
    norms = model["num_layers"] * (2 * 2048 + 2 * 128) + 2048
    assert checkpoints.parameters(model) + norms == 2_031_739_904
