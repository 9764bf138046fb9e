"""How a rank leaves after an error: at once.

Python would first wait for the rank's helper processes, and Megatron makes those that read data
deaf to SIGTERM: a rank that failed would wait for them for ever, and hold its GPU.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Ends this process; its helpers see that and end as well."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def leaving_after_errors() -> Iterator[None]:
    """Prints an error that nothing caught, as Python does, and leaves."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException:  # torch's CheckpointException, of a save that failed, is no Exception
        sys.excepthook(*sys.exc_info())
        leave(1)
