"""A run that begins with imported weights, as docs/release.md says, begins with them only once."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.release import import_hf
from tests.train.small_run import ITERATIONS, SmallRun


def write_hf_model(folder, settings):
    """Writes a Hugging Face model of that model.yaml to which all tokens are equally likely."""
    config = Qwen3Config(
        vocab_size=settings["padded_vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["ffn_hidden_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=settings["num_attention_heads"],
        num_key_value_heads=settings["num_query_groups"],
        head_dim=settings["kv_channels"],
        max_position_embeddings=settings["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": float(settings["rotary_base"])},
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)


def test_a_run_begins_with_an_imported_model_and_resumes_from_its_own_checkpoints(data, tmp_path):
    run = SmallRun(data, tmp_path / "artifacts")
    write_hf_model(tmp_path / "hf", run.parameters["model"])
    imported = tmp_path / "imported"
    import_hf.main(["--hf", str(tmp_path / "hf"), "--output", str(imported)])
    run.runtime["extra_arguments"] = f"--pretrained-checkpoint {imported}"
    run.stop_after(4)
    code, output = run.launch(1)
    assert code == 0, output
    assert run.losses()[1] == pytest.approx(math.log(512), rel=1e-6)
    trained = [line["iteration"] for line in run.lines() if "loss" in line]
    assert trained == list(range(1, ITERATIONS[0] + 1))
