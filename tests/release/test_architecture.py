import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scripts.release.architecture import QKV, Architecture


@st.composite
def architectures(draw):
    groups = draw(st.integers(1, 4))
    return Architecture(
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(st.integers(1, 5)),
        ffn_hidden_size=draw(st.integers(1, 5)),
        num_attention_heads=groups * draw(st.integers(1, 4)),
        num_query_groups=groups,
        head_dim=draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(1, 9)),
        max_position_embeddings=16,
        rotary_base=10000.0,
        norm_epsilon=1e-6,
        tied_embeddings=draw(st.booleans()),
    )


@given(architecture=architectures())
def test_packing_and_unpacking_loses_nothing(architecture):
    parts, count = {}, 0
    for name, _, shape in architecture.sources():
        parts[name] = torch.arange(count, count + shape.numel()).view(shape)
        count += shape.numel()
    unpacked = {}
    for name in architecture.megatron_names():
        unpacked |= architecture.unpack(name, architecture.pack(name, parts))
    assert unpacked.keys() == parts.keys()
    assert all(torch.equal(unpacked[name], part) for name, part in parts.items())


def test_queries_keys_and_values_are_interleaved_by_group():
    """Two groups of two heads of one dimension: Megatron's rows are q q k v q q k v."""
    architecture = Architecture(1, 1, 1, 4, 2, 1, 1, 16, 10000.0, 1e-6, False)
    stacked = torch.arange(8.0).view(1, 8, 1)
    parts = architecture.unpack(f"decoder.layers.{QKV}", stacked)
    rows = [part.flatten().tolist() for part in parts.values()]
    assert rows == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_settings_are_the_reverse_of_read(architecture, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(architecture.settings()))
    assert Architecture.read(file) == architecture


def test_a_missing_setting_is_named(model_file, tmp_path):
    settings = yaml.safe_load(model_file.read_text())
    del settings["norm_epsilon"]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match="norm_epsilon is missing"):
        Architecture.read(tmp_path / "model.yaml")


def test_kaiyuan_has_the_published_number_of_parameters():
    architecture = Architecture.read("scripts/params/qwen3_1p7b/model.yaml")
    assert sum(shape.numel() for _, _, shape in architecture.sources()) == 2_031_739_904
