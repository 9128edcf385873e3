"""The CPU kernels of every instruction set that this processor can run, not only the best one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vegas_ops import _C

SETS = ("baseline", "x86-64-v3", "x86-64-v4")
TESTS = Path(__file__).parent


def run(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VEGAS_OPS_ISA": isa}
    return subprocess.run(
        [sys.executable, *command],
        env=environment, capture_output=True, text=True, timeout=500, cwd=TESTS.parent,
    )  # fmt: skip


@pytest.mark.parametrize("isa", SETS[:-1])
def test_lesser_instruction_set(isa: str) -> None:
    best = _C.cpu_isa()
    if best not in SETS or SETS.index(best) <= SETS.index(isa):
        pytest.skip(f"{best} is what this processor runs anyway")
    chosen = run(isa, "-c", "from vegas_ops import _C; print(_C.cpu_isa())")
    assert chosen.stdout.strip() == isa, chosen.stderr
    files = [str(TESTS / name) for name in ("test_verify.py", "test_sparse.py", "test_select.py")]
    chosen_tests = "(head_dims or row_counts or adversarial) and cpu"
    result = run(isa, "-m", "pytest", "-q", "-x", "-k", chosen_tests, *files)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:]
