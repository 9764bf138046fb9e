import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from scripts.release import export, megatron_model
from tests.release.conftest import END_OF_DOCUMENT


def test_transformers_computes_megatrons_logits_at_every_position(
    exported, checkpoint, architecture
):
    tokens = torch.randint(0, architecture.vocab_size, (2, 128))
    megatron = megatron_model.build(architecture)
    megatron_model.load(megatron, checkpoint)
    expected = megatron_model.logits(megatron, tokens)
    model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    assert isinstance(model, Qwen3ForCausalLM)
    with torch.no_grad():
        actual = model(tokens).logits
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max()


def test_the_folder_says_what_it_holds(exported, tokenizer_folder):
    config = json.loads((exported / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000
    assert (config["head_dim"], config["vocab_size"]) == (16, 4096)
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == END_OF_DOCUMENT
    assert (
        json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
        == END_OF_DOCUMENT
    )
    provenance = json.loads((exported / "export.json").read_text())
    assert provenance["iteration"] == 100
    weights = load_file(exported / "model.safetensors")
    assert provenance["parameters"] == sum(tensor.numel() for tensor in weights.values())
    for name in ("merges.txt", "vocab.json", "tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (tokenizer_folder / name).read_bytes()


def test_several_safetensors_files_hold_the_same_weights(checkpoint, run_export, exported):
    folder = run_export(checkpoint, "--max-shard-size", "1MB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    expected = load_file(exported / "model.safetensors")
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], expected[name])
    AutoModelForCausalLM.from_pretrained(folder)


def test_weights_can_be_rounded(checkpoint, run_export, exported):
    folder = run_export(checkpoint, "--dtype", "bfloat16")
    rounded = load_file(folder / "model.safetensors")
    exact = load_file(exported / "model.safetensors")
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_rows_that_only_pad_the_vocabulary_are_left_out(
    make_checkpoint, run_export, wider_vocabulary, tmp_path
):
    padded = make_checkpoint(architecture=wider_vocabulary)
    weights = load_file(run_export(padded) / "model.safetensors")
    assert weights["lm_head.weight"].shape == weights["model.embed_tokens.weight"].shape
    assert weights["lm_head.weight"].shape[0] == 4096 < wider_vocabulary.vocab_size


def test_a_tied_model_has_no_output_layer(make_checkpoint, run_export, tied_model):
    architecture, file = tied_model
    folder = run_export(make_checkpoint(architecture=architecture), model=file)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_earlier_export_is_replaced(checkpoint, run_export, tmp_path):
    folder = run_export(checkpoint, "--max-shard-size", "1MB", output=tmp_path / "model")
    run_export(checkpoint, output=folder)
    assert not list(folder.glob("model-*.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("qk_layernorm", False), ("normalization", "LayerNorm"), ("disable_bias_linear", False)],
)
def test_another_architecture_is_refused_by_name(
    checkpoint, run_export, changed_model, setting, value
):
    with pytest.raises(SystemExit, match=f"{setting} is {value!r}"):
        run_export(checkpoint, model=changed_model(**{setting: value}))


def test_a_checkpoint_of_another_size_is_refused(checkpoint, run_export, changed_model, tmp_path):
    with pytest.raises(SystemExit, match=r"\[2\] layers, the model 3"):
        run_export(checkpoint, model=changed_model(num_layers=3), output=tmp_path / "model")
    with pytest.raises(SystemExit, match="would be"):
        run_export(checkpoint, model=changed_model(ffn_hidden_size=96), output=tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.yaml"]


def test_a_folder_that_is_no_checkpoint_is_refused(checkpoint, run_export):
    with pytest.raises(SystemExit, match="no complete Megatron checkpoint"):
        run_export(checkpoint.parent)


def test_the_end_of_document_can_be_another_token(checkpoint, run_export):
    folder = run_export(checkpoint, "--end-of-document", "<|im_end|>")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == END_OF_DOCUMENT + 2
    with pytest.raises(SystemExit, match="has no token '<eos>'"):
        run_export(checkpoint, "--end-of-document", "<eos>")
    assert export.read_export(folder)["end_of_document_id"] == END_OF_DOCUMENT + 2
