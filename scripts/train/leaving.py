"""How a rank leaves after an error: at once.

Python would first wait for the rank's helper processes, and Megatron makes those that read data
deaf to SIGTERM: a rank that failed would wait for them for ever, and hold its GPU.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from scripts.common.files import write_json


def leave(code: int) -> NoReturn:
    """Ends this process; its helpers see that and end as well."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # on a full disk, too
        os._exit(code)


def leave_because(failure: Path, record: dict[str, Any]) -> NoReturn:
    """Says why this rank ends, in the log and, by `failure`, to the launcher; leaves."""
    try:
        print(record["message"], file=sys.stderr)
        write_json(failure, record)
    finally:
        leave(record["exit_code"])


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
