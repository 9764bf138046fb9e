"""The sweep's points, table and recommendation."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.common.settings import SettingsError, load_parameters
from scripts.profiling import breakdown, point, report, sweep

ROOT = Path(__file__).parents[2]
MODELS = [path.parent.name for path in ROOT.glob("scripts/params/*/profiling.yaml")]


def measured(tflops: float, **settings) -> dict:
    return {
        "model": "m",
        "device": "NVIDIA H200",
        "torch": "2.11",
        "peak_tflops": 989.0,
        "settings": {**point.DEFAULTS, "layers": "fast", **settings},
        "status": "measured",
        "tflops": tflops,
        "tokens_per_second": 100 * tflops,
        "seconds_per_step": 700 / tflops,
        "peak_memory_gib": 70.0,
        "first_step_seconds": 20.0,
    }


def failed(status: str, **settings) -> dict:
    return {**measured(1.0, **settings), "status": status}


@pytest.mark.parametrize("model", MODELS)
def test_every_models_sweep_names_settings_that_a_point_knows(model):
    points = sweep.points(sweep.load_profiling(model))
    assert points
    for name, settings in points.items():
        assert settings.keys() <= point.DEFAULTS.keys()
        assert "/" not in name


def test_a_sweep_is_every_combination_once():
    grid = {"layers": ["fast", "local"], "micro_batch_size": [1, 2]}
    again = {"layers": ["fast"], "micro_batch_size": [2]}
    assert list(sweep.points({"steps": 5, "sweeps": [grid, again]})) == [
        "layers=fast,micro_batch_size=1",
        "layers=fast,micro_batch_size=2",
        "layers=local,micro_batch_size=1",
        "layers=local,micro_batch_size=2",
    ]


def test_an_unknown_setting_of_a_sweep_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    settings = {"steps": 5, "sweeps": [{"micro_batch": [1]}]}
    (tmp_path / "m/profiling.yaml").write_text(yaml.safe_dump(settings))
    schema = ROOT / "scripts/params/profiling.schema.yaml"
    (tmp_path / schema.name).write_bytes(schema.read_bytes())
    monkeypatch.setattr(sweep, "PARAMETERS", tmp_path)
    with pytest.raises(SettingsError, match="did you mean micro_batch_size"):
        sweep.load_profiling("m")


def test_the_fastest_point_that_changes_no_result_is_recommended(tmp_path):
    points = [
        measured(550.0, micro_batch_size=8),
        measured(490.0, micro_batch_size=4, layers="transformer_engine"),
        measured(600.0, micro_batch_size=4, layers="transformer_engine", fp8=True),
        failed("out of memory", micro_batch_size=16),
    ]
    files = [tmp_path / f"{number}.json" for number in range(len(points))]
    for path, content in zip(files, points, strict=True):
        path.write_text(json.dumps(content))
    report.main(["--points", *map(str, files), "--output-dir", str(tmp_path / "out")])
    recommended = json.loads((tmp_path / "out/recommended.json").read_text())
    assert (recommended["layers"], recommended["micro_batch_size"]) == ("fast", 8)
    text = (tmp_path / "out/sweep.md").read_text()
    assert '--config "runtime={layers: fast, micro_batch_size: 8}"' in text
    assert "| fast, micro batch size 16 | out of memory |" in text
    assert "55.6%" in text
    assert "fp8" in (tmp_path / "out/sweep.svg").read_text()


def test_the_command_to_adopt_a_point_has_all_of_its_settings():
    settings = {"recompute": "full", "attention_backend": "flash", "optimizer_sharding": True}
    *command, runtime = shlex.split(report.adoption(measured(1.0, micro_batch_size=2, **settings)))
    assert command == ["snakemake", "train_all", "--config"]
    adopted = yaml.safe_load(runtime.removeprefix("runtime="))
    assert (adopted["layers"], adopted["micro_batch_size"]) == ("fast", 2)
    arguments = shlex.split(adopted["extra_arguments"])
    assert arguments[arguments.index("--recompute-granularity") + 1] == "full"
    assert arguments[arguments.index("--attention-backend") + 1] == "flash"
    assert "--use-distributed-optimizer" in arguments


def test_a_sweep_of_which_nothing_was_measured_fails_with_the_reasons(tmp_path, capsys):
    (tmp_path / "0.json").write_text(json.dumps(failed("out of memory", micro_batch_size=16)))
    with pytest.raises(SystemExit, match="1"):
        report.main(["--points", str(tmp_path / "0.json"), "--output-dir", str(tmp_path)])
    assert "micro batch size 16: out of memory" in capsys.readouterr().err


def test_kernels_are_grouped_by_what_they_do():
    names = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "matrix products",
        "cross_entropy_backward": "cross entropy",
        "qk_norm_rope_forward": "QK-norm and rotation",
        "rms_norm_backward": "RMSNorm and residual",
        "swiglu_forward": "SwiGLU",
        "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>": "optimizer and clipping",
        "vectorized_elementwise_kernel<8, CUDAFunctor_add<BFloat16>>": "copies, adds, fills",
    }
    assert {name: breakdown.group_of(name) for name in names} == names
    kernels = [{"name": name, "milliseconds": 2.0, "calls": 3} for name in names]
    assert breakdown.breakdown(kernels)["attention"] == (2.0, 3)
    assert "| all | 16.0 |" in breakdown.table(kernels)


def test_running_out_of_memory_is_a_result_and_other_failures_name_their_error(tmp_path):
    outcomes = {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate": {
            "status": "out of memory"
        },
        "x\nValueError: no such thing\n[rank0] bye": {
            "status": "failed",
            "error": "ValueError: no such thing",
        },
    }
    for text, expected in outcomes.items():
        assert point.outcome_of_failure(text, 1) == expected


def test_a_point_runs_megatrons_loop_on_the_cpu_and_traces_it(tmp_path):
    output = tmp_path / "point.json"
    command = [sys.executable, "-m", "scripts.profiling.point", "--model", "cpu_smoke"]
    command += ["--gpus", "0", "--steps", "5", "--output", str(output)]
    command += ["--settings", '{"layers": "fast", "global_batch_size": 4, "micro_batch_size": 2}']
    subprocess.run([*command, "--trace-dir", str(tmp_path / "trace")], check=True, cwd=ROOT)
    record = json.loads(output.read_text())
    assert record["status"] == "measured", output.with_suffix(".log").read_text()[-2000:]
    assert record["tokens_per_step"] == 4 * 128
    assert len(record["losses"]) == 5
    assert record["tflops"] > 0
    kernels = json.loads((tmp_path / "trace/kernels.json").read_text())
    assert any("mm" in kernel["name"] for kernel in kernels)
    assert (tmp_path / "trace/trace.json.gz").stat().st_size > 1000


def test_a_point_on_several_ranks_shares_the_batch_among_them(tmp_path):
    settings = {**point.DEFAULTS, "global_batch_size": 4, "optimizer_sharding": True}
    measured = {
        ranks: point.measure(
            load_parameters("cpu_smoke"), settings, 0, 5, tmp_path / "log", [], cpu_ranks=ranks
        )
        for ranks in (1, 2)
    }
    assert measured[2]["ranks"] == 2, (tmp_path / "log").read_text()[-2000:]
    assert measured[2]["losses"] == pytest.approx(measured[1]["losses"], rel=1e-4)
