import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.common.settings import PARAMETERS, check
from scripts.release import import_hf, megatron_model
from scripts.release.architecture import Architecture
from scripts.release.checkpoint import Checkpoint


@pytest.fixture(params=["untied float32", "untied bfloat16", "tied bfloat16"])
def hf_model(request, tmp_path, tokenizer_folder):
    """A Qwen3 model as transformers itself makes and saves it."""
    tied, dtype = request.param.split()
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=tied == "tied",
        dtype=dtype,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.5)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    return tmp_path / "hf"


def imported(folder, tmp_path, *arguments):
    output = tmp_path / "run"
    import_hf.main(["--hf", str(folder), "--output", str(output), *map(str, arguments)])
    return output


def weights(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_import_and_export_give_the_same_bits(hf_model, run_export, tmp_path):
    run = imported(hf_model, tmp_path)
    exported = weights(run_export(run, model=run / "model.yaml"))
    original = weights(hf_model)
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor, exported[name])


def test_megatron_computes_what_transformers_computed(hf_model, tmp_path):
    run = imported(hf_model, tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(
        hf_model, dtype=torch.float32, attn_implementation="eager"
    )
    megatron = megatron_model.build(Architecture.read(run / "model.yaml"))
    megatron_model.load(megatron, Checkpoint(run).folder)
    tokens = torch.randint(0, 1000, (1, 64))
    with torch.no_grad():
        expected = model(tokens).logits
    actual = megatron_model.logits(megatron, tokens)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_checkpoint_survives_export_and_import(checkpoint, exported, model_file, tmp_path):
    run = imported(exported, tmp_path, "--model", model_file)
    before, after = Checkpoint(checkpoint), Checkpoint(run)
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors)


def test_the_settings_written_are_settings_of_this_project(hf_model, tmp_path):
    file = imported(hf_model, tmp_path) / "model.yaml"
    settings = check(yaml.safe_load(file.read_text()), PARAMETERS / "model.schema.yaml", "model")
    assert settings["rotary_base"] == 1000000


@pytest.fixture
def doctored(exported, tmp_path):
    def doctor(config=None, tensors=None):
        folder = shutil.copytree(exported, tmp_path / "doctored")
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | (config or {})))
        if tensors:
            save_file(
                load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors"
            )
        return folder

    return doctor


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act 'gelu', attention_bias True"),
    ],
)
def test_unsupported_features_are_refused_by_name(doctored, tmp_path, config, message):
    with pytest.raises(SystemExit, match=message):
        imported(doctored(config), tmp_path)
    assert not (tmp_path / "run").exists()


def test_more_norms_are_refused_by_name(doctored, tmp_path):
    norm = "model.layers.0.post_feedforward_layernorm.weight"
    with pytest.raises(SystemExit, match=f"not supported .*{norm}"):
        imported(doctored(tensors={norm: torch.ones(64)}), tmp_path)


def test_another_model_than_the_given_one_is_refused(exported, changed_model, tmp_path):
    with pytest.raises(SystemExit, match=r"rotary_base 10000.0 \(there: 500000.0\)"):
        imported(exported, tmp_path, "--model", changed_model(rotary_base=500000))
