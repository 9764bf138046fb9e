"""Runs the operations' tests through the Triton kernels, by Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_layers_functions.py")


def test_the_kernels_pass_the_tests_of_the_operations_in_tritons_interpreter():
    pytest.importorskip("triton")
    # The interpreter is chosen as triton is imported: it needs a process of its own.
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=TESTS.parents[2],
    )
    assert result.returncode == 0, result.stdout
