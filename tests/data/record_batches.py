"""A rank of a training run that also writes down the tokens which its forward steps receive.

Started by the launcher in place of scripts.train.pretrain. Environment: RECORD_DIR, the folder for
one file a micro batch; STOP_AFTER, the iteration in which a SIGTERM reaches the rank (0: never).
"""

import os
import signal
from pathlib import Path

import numpy as np

from scripts.train import cpu, pretrain

FOLDER = Path(os.environ["RECORD_DIR"])
STOP_AFTER = int(os.environ["STOP_AFTER"])
RANK = int(os.environ.get("RANK", "0"))


def record() -> None:
    """Wraps the loop's forward step; Megatron can be imported only now."""
    from megatron.training import get_args

    from scripts.train import loop

    forward_step, get_batch = loop.forward_step, loop.get_batch
    received = []

    def batch_and_record(data_iterator):
        received.append(get_batch(data_iterator))
        return received[-1]

    def forward_and_record(data_iterator, model):
        result = forward_step(data_iterator, model)
        iteration = get_args().curr_iteration + 1
        kind = "train" if model.training else "valid"
        name = f"{kind}_{iteration:05d}_{len(received):05d}_{RANK}.npy"
        np.save(FOLDER / name, received[-1]["tokens"].numpy())
        if iteration == STOP_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    loop.get_batch, loop.forward_step = batch_and_record, forward_and_record


if __name__ == "__main__":
    install = cpu.install
    cpu.install = lambda: [install(), record()]
    pretrain.main()
