"""What all helper processes of a rank have in common; kept apart, since it imports nothing big."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection


def follow_rank() -> None:
    """Makes this process deaf to SIGTERM, and ends it as soon as the rank that made it is gone.

    Slurm sends SIGTERM to every process of a job, and a rank cannot save without its helpers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    """Waits for the end of the rank, however it ends; what a helper still does never counts."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
