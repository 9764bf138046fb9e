"""A tokenizer's files come from the hub, agree with each other and fit the model."""

import json
import shutil

import pytest
import yaml
from transformers import AutoTokenizer

from scripts.common.files import read_json, sha256
from scripts.data.tokenizer import FILES, main
from tests.data.hub_server import Hub, point_at


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    """A tokenizer that a test may change."""
    return shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({"padded_vocab_size": 1024}))
    return path


def check(folder, model, token="<|endoftext|>", *options):
    where = ["--tokenizer", str(folder), "--model", str(model)]
    main(["check", *where, "--end-of-document", token, *options])


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_found_agrees_with_transformers(folder, model, tmp_path, capsys):
    output = tmp_path / "facts.json"
    check(folder, model, "<|endoftext|>", "--output", str(output))
    facts = read_json(output)
    reference = AutoTokenizer.from_pretrained(folder)
    assert facts["vocabulary_size"] == len(reference)
    assert facts["end_of_document_id"] == reference.convert_tokens_to_ids("<|endoftext|>")
    assert facts["added_tokens"] == reference.get_added_vocab()
    assert facts["files"]["tokenizer.json"]["sha256"] == sha256(folder / "tokenizer.json")
    line = capsys.readouterr().out
    assert line.startswith("tokenizer: 1,021 tokens and 3 added ones in 1,024 rows")
    assert line.count("\n") == 1


def test_a_deviating_eos_token_is_said(folder, model, capsys):
    edit(folder / "tokenizer_config.json", lambda config: config.update(eos_token="<|im_end|>"))
    check(folder, model)
    assert "own eos_token is <|im_end|>" in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, model, name):
    (folder / name).unlink()
    with pytest.raises(SystemExit, match=f"lacks {name}"):
        check(folder, model)


def test_ids_beyond_the_models_rows_are_refused(folder, model):
    model.write_text(yaml.safe_dump({"padded_vocab_size": 1023}))
    with pytest.raises(SystemExit, match=r"1,023 rows .* another model's tokenizer"):
        check(folder, model)


def test_an_unknown_end_of_document_is_refused_with_what_there_is(folder, model):
    with pytest.raises(SystemExit, match=r"'<eos>' is no token .*<\|endoftext\|>"):
        check(folder, model, "<eos>")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vocab.json", lambda vocab: vocab.update({"zzz": 5}), "another vocabulary"),
        (
            "tokenizer_config.json",
            lambda config: config.update(added_tokens_decoder={"1021": {"content": "<s>"}}),
            "id 1021 is '<s>' in tokenizer_config.json",
        ),
        ("tokenizer.json", lambda file: file["model"]["merges"].pop(), "other merges"),
        ("tokenizer.json", lambda file: file["model"].update(type="Unigram"), "Unigram|variant"),
    ],
)
def test_files_that_contradict_each_other_are_refused(folder, model, name, change, message):
    edit(folder / name, change)
    with pytest.raises(SystemExit, match=message):
        check(folder, model)


def test_a_damaged_file_is_named(folder, model):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(SystemExit, match=r"tokenizer_config\.json is not valid JSON"):
        check(folder, model)


@pytest.fixture
def server(folder, monkeypatch):
    files = {name: (folder / name).read_bytes() for name in FILES}
    with Hub(files, "model", "owner/model", ("main", "refs/pr/1")) as server:
        point_at(server.url, monkeypatch)
        yield server


def fetch(target, revision="refs/pr/1"):
    source = ["--repository", "owner/model", "--revision", revision]
    main(["fetch", "--tokenizer", str(target), *source])


def test_the_four_files_come_from_a_pull_request_of_the_hub(server, folder, tmp_path):
    fetch(tmp_path / "fetched")
    for name in FILES:
        assert (tmp_path / "fetched" / name).read_bytes() == (folder / name).read_bytes()


def test_a_wrong_small_file_is_refused(server, tmp_path):
    server.fail("GET .*merges.txt", corrupt=True, times=9)
    with pytest.raises(SystemExit, match=r"merges\.txt: what arrived is not the content"):
        fetch(tmp_path / "fetched")
    assert not (tmp_path / "fetched/merges.txt").exists()


def test_a_revision_without_the_files_says_so(server, tmp_path):
    del server.files["vocab.json"]
    with pytest.raises(SystemExit, match=r"no vocab\.json at revision main"):
        fetch(tmp_path / "fetched", "main")
    with pytest.raises(SystemExit, match="no revision 'refs/pr/2'"):
        fetch(tmp_path / "fetched", "refs/pr/2")
