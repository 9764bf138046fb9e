"""Rewrites a checkpoint as two parallel ranks save it; run under torchrun by test_parallel.py.

Usage: reshard.py CHECKPOINT MODEL_YAML OUTPUT (writes OUTPUT/tensor and OUTPUT/pipeline)
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from megatron.core import parallel_state

from scripts.release import megatron_model
from scripts.release.architecture import Architecture


def main(checkpoint, model_file, output):
    torch.distributed.init_process_group("gloo")
    architecture = Architecture.read(Path(model_file))
    for kind in ("tensor", "pipeline"):
        sizes = {f"{kind}_model_parallel_size": 2}
        parallel_state.initialize_model_parallel(**sizes)
        model = megatron_model.build(architecture, **sizes)
        megatron_model.load(model, checkpoint)
        folder = Path(output) / kind
        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        torch.distributed.barrier()
        megatron_model.save(model, folder, iteration=7)
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with patch.multiple(
        torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None
    ):
        main(*sys.argv[1:])
