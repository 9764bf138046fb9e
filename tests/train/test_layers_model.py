"""The fused layers inside Megatron's GPTModel against Megatron's local layers."""

from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig

from scripts.train.layers import functions
from scripts.train.layers.modules import fast_spec, fused_loss

VOCABULARY, LENGTH, BATCH = 512, 48, 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch) -> str:
    if request.param == "cpu":
        # Megatron asks for the CUDA device and its random generator, also where nothing is random.
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
        monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
        monkeypatch.setattr(random, "_set_all_rng_states", lambda *_: None)
    else:
        random.model_parallel_cuda_manual_seed(1)
    return request.param


def configuration(**changes) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 3,
            "hidden_size": 64,
            "ffn_hidden_size": 160,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 24,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "init_method_std": 0.2,  # large: attention and losses far from uniform
            **changes,
        }
    )


def local_spec(config: TransformerConfig):
    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def model(spec, device: str, dtype=torch.float32, tied=False, **changes) -> GPTModel:
    config = configuration(params_dtype=dtype, bf16=dtype is torch.bfloat16, **changes)
    gpt = GPTModel(
        config,
        spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )
    return gpt.to(device=device, dtype=dtype)


def batch(device: str) -> dict:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=device)
    positions = torch.arange(LENGTH, device=device).expand(BATCH, LENGTH)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": positions,
        "attention_mask": None,
        "labels": tokens[:, 1:].contiguous(),
    }


def masked(inputs: dict) -> dict:
    """The same batch for the local layers, which make no causal mask on a CPU themselves."""
    shape = (1, 1, LENGTH, LENGTH)
    mask = torch.ones(shape, device=inputs["labels"].device, dtype=torch.bool).triu(1)
    return {**inputs, "attention_mask": mask}


def inputs_of(spec, inputs: dict) -> dict:
    return masked(inputs) if spec is local_spec else inputs


def with_weights_of(target: GPTModel, source: GPTModel) -> GPTModel:
    target.load_state_dict(source.state_dict())
    return target


def randomize_norms(gpt: GPTModel) -> GPTModel:
    for name, parameter in gpt.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return gpt


def loss_and_gradients(gpt: GPTModel, inputs: dict, weights: torch.Tensor, **arguments):
    """One backward pass of a randomly weighted loss: every token has its own gradient."""
    loss = gpt(**inputs, **arguments)
    gpt.zero_grad()
    (loss.float() * weights).sum().backward()
    return loss, {name: parameter.grad for name, parameter in gpt.named_parameters()}


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def test_loss_and_every_gradient_are_those_of_megatrons_local_layers(device):
    local = randomize_norms(model(local_spec, device))
    fast = with_weights_of(model(fast_spec, device), local)
    inputs, weights = batch(device), torch.rand(BATCH, LENGTH, device=device)
    loss, gradients = loss_and_gradients(fast, inputs, weights, output_processor=fused_loss)
    expected_loss, expected = loss_and_gradients(local, masked(inputs), weights)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 2e-5, name


@pytest.mark.skipif(functions.INTERPRETED, reason="Triton's interpreter has no bf16 arithmetic")
def test_bf16_is_as_close_to_fp32_as_megatrons_local_layers(device):
    reference = randomize_norms(model(local_spec, device))
    local = with_weights_of(model(local_spec, device, torch.bfloat16), reference)
    fast = with_weights_of(model(fast_spec, device, torch.bfloat16), reference)
    # The reference computes with the rounded weights: only arithmetic is compared.
    reference.load_state_dict(local.state_dict())
    inputs, weights = batch(device), torch.rand(BATCH, LENGTH, device=device)
    exact_loss, exact = loss_and_gradients(reference, masked(inputs), weights)
    local_loss, locals_ = loss_and_gradients(local, masked(inputs), weights)
    fast_loss, fasts = loss_and_gradients(fast, inputs, weights, output_processor=fused_loss)
    assert (
        relative_error(fast_loss, exact_loss) < 1.5 * relative_error(local_loss, exact_loss) + 1e-3
    )
    ours, theirs = (
        {name: relative_error(grads[name], gradient) for name, gradient in exact.items()}
        for grads in (fasts, locals_)
    )
    assert mean(ours.values()) < 1.1 * mean(theirs.values())
    for name, error in ours.items():  # the error of a norm's few weights is itself a random number
        assert error < 2 * theirs[name] + 2e-3, name


def test_full_recompute_changes_no_number(device):
    fast = model(fast_spec, device)
    recomputing = with_weights_of(
        model(
            fast_spec,
            device,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
        fast,
    )
    inputs, weights = batch(device), torch.rand(BATCH, LENGTH, device=device)
    loss, gradients = loss_and_gradients(fast, inputs, weights)
    same_loss, same = loss_and_gradients(recomputing, inputs, weights)
    torch.testing.assert_close(loss, same_loss, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_several_micro_batches_accumulate_in_megatrons_buffer(device, tied):
    local = model(local_spec, device, tied=tied)
    fast = with_weights_of(model(fast_spec, device, tied=tied), local)
    data_parallel = DistributedDataParallel(
        fast.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), fast
    )
    data_parallel.zero_grad_buffer()
    for _ in range(2):
        inputs = batch(device)
        data_parallel(**inputs, output_processor=fused_loss).sum().backward()
        local(**masked(inputs)).sum().backward()
    for (name, parameter), expected in zip(
        fast.named_parameters(), local.parameters(), strict=True
    ):
        assert relative_error(parameter.main_grad, expected.grad) < 2e-5, name


@pytest.mark.parametrize(("writer", "reader"), [(local_spec, fast_spec), (fast_spec, local_spec)])
def test_checkpoints_are_interchangeable_with_local_layers(device, tmp_path, writer, reader):
    saved, loaded = model(writer, device), model(reader, device)
    assert list(saved.state_dict()) == list(loaded.state_dict())
    inputs = batch(device)
    expected = saved(**inputs_of(writer, inputs))
    save(saved, tmp_path)
    load(loaded, tmp_path)
    torch.testing.assert_close(loaded(**inputs_of(reader, inputs)), expected, rtol=1e-5, atol=1e-5)


def test_checkpoint_keys_are_transformer_engines(device):
    keys = {value.key for value in model(fast_spec, device).sharded_state_dict().values()
            if hasattr(value, "key")}  # fmt: skip
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in keys
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.final_layernorm.weight" in keys
    assert not any("input_layernorm" in key or "pre_mlp_layernorm" in key for key in keys)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"normalization": "LayerNorm"}, "normalization=LayerNorm"),
        ({"qk_layernorm": False}, "qk_layernorm=False"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            "recompute_granularity=selective",
        ),
    ],
)
def test_a_model_that_the_layers_do_not_compute_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        fast_spec(configuration(**changes))


def test_a_mask_is_refused_rather_than_ignored(device):
    mask = torch.zeros(1, 1, LENGTH, LENGTH, device=device, dtype=torch.bool)
    with pytest.raises(ValueError, match="an attention mask"):
        model(fast_spec, device)(**{**batch(device), "attention_mask": mask})


def packed(lengths: list[int], device: str) -> PackedSeqParams:
    """Says that a row holds documents of these lengths."""
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return PackedSeqParams("thd", borders, borders, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)


DOCUMENTS = [13, 1, 27, 7]


def test_a_document_in_a_packed_sample_is_computed_as_if_it_were_alone(device):
    fast = randomize_norms(model(fast_spec, device))
    inputs = {name: value for name, value in batch(device).items() if name != "labels"}
    row = {name: value[:1] if value is not None else None for name, value in inputs.items()}
    together = fast(**row, packed_seq_params=packed(DOCUMENTS, device))
    unseparated = fast(**row)
    end = 0
    for length in DOCUMENTS:
        part = slice(end, end := end + length)
        alone = fast(row["input_ids"][:, part], row["position_ids"][:, :length], None)
        torch.testing.assert_close(together[:, part], alone, rtol=1e-5, atol=1e-5)
        if part.start and length > 1:
            assert relative_error(unseparated[:, part], alone) > 0.1


def test_separated_documents_have_the_loss_and_gradients_of_local_layers_with_a_mask(device):
    local = randomize_norms(model(local_spec, device))
    fast = with_weights_of(model(fast_spec, device), local)
    inputs, weights = batch(device), torch.rand(1, BATCH * LENGTH, device=device)
    document = torch.arange(len(DOCUMENTS), device=device).repeat_interleave(
        torch.tensor(DOCUMENTS, device=device)
    )
    visible = (document[:, None] == document) & torch.ones(
        LENGTH, LENGTH, device=device
    ).tril().bool()
    mask = {**inputs, "attention_mask": ~visible.expand(BATCH, 1, LENGTH, LENGTH)}
    row = {
        name: value.reshape(1, -1) if value is not None else None for name, value in inputs.items()
    }
    loss, gradients = loss_and_gradients(
        fast,
        row,
        weights,
        output_processor=fused_loss,
        packed_seq_params=packed(DOCUMENTS * BATCH, device),
    )
    expected_loss, expected = loss_and_gradients(local, mask, weights.view(BATCH, LENGTH))
    torch.testing.assert_close(loss.view(BATCH, LENGTH), expected_loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 2e-5, name


def save(gpt: GPTModel, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(gpt.sharded_state_dict(), str(folder))


def load(gpt: GPTModel, folder: Path) -> None:
    gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), str(folder)))
