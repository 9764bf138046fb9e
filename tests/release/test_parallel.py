import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

RESHARD = Path(__file__).with_name("reshard.py")


def test_checkpoints_of_parallel_ranks_export_the_same_weights(
    checkpoint, exported, model_file, run_export, tmp_path
):
    """Saved by two tensor parallel ranks, and by two pipeline stages: Megatron's own resharding."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launcher, RESHARD, checkpoint, model_file, tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    expected = load_file(exported / "model.safetensors")
    for kind in ("tensor", "pipeline"):
        folder = tmp_path / kind
        chunks = FileSystemReader(folder).read_metadata().state_dict_metadata
        qkv = chunks["decoder.layers.self_attention.linear_qkv.weight"].chunks
        assert len(qkv) == (4 if kind == "tensor" else 2)
        weights = load_file(run_export(folder) / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
