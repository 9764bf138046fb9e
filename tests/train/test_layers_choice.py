"""Which layers `layers: …` takes on which machine."""

import importlib.util

import pytest

from scripts.train.layers.choice import choose


@pytest.fixture
def installed(monkeypatch):
    """Makes packages look installed or not: installed(triton=True, transformer_engine=False)."""

    def install(**packages: bool) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: packages[name] or None if name in packages else real(name, *rest),
        )

    return install


def test_auto_takes_the_fastest_that_is_installed(installed):
    installed(triton=True, transformer_engine=True)
    assert choose("auto", gpus=8).name == "fast"
    installed(triton=False, transformer_engine=True)
    assert choose("auto", gpus=8).name == "transformer_engine"
    installed(triton=False, transformer_engine=False)
    choice = choose("auto", gpus=8)
    assert choice.name == "local"
    assert "triton is not installed" in choice.reason


def test_auto_leaves_parallelism_to_layers_that_have_it(installed):
    installed(triton=True, transformer_engine=True)
    assert choose("auto", gpus=8, tensor_parallel=2).name == "transformer_engine"
    installed(triton=True, transformer_engine=False)
    assert choose("auto", gpus=8, context_parallel=2).name == "local"


def test_a_cpu_runs_the_module_tree_that_a_gpu_runs(installed):
    installed(triton=False, transformer_engine=True)
    choice = choose("auto", gpus=0)
    assert choice.name == "fast"
    assert "fast_spec" in choice.arguments


def test_fp8_needs_transformer_engine(installed):
    installed(triton=True, transformer_engine=True)
    assert choose("auto", gpus=1, fp8=True).name == "transformer_engine"
    installed(triton=True, transformer_engine=False)
    with pytest.raises(ValueError, match="it is not installed"):
        choose("auto", gpus=1, fp8=True)


@pytest.mark.parametrize(
    ("requested", "arguments", "why"),
    [
        ("transformer_engine", {"gpus": 1}, "not installed"),
        ("transformer_engine", {"gpus": 0}, "needs a GPU"),
        ("fast", {"gpus": 1, "tensor_parallel": 2}, "parallelism"),
        ("quick", {"gpus": 1}, "none of auto, fast, transformer_engine, local"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(installed, requested, arguments, why):
    installed(triton=True, transformer_engine=False)
    with pytest.raises(ValueError, match=why):
        choose(requested, **arguments)
