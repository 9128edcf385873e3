"""The ops called from C++ through the C interface alone; on a GPU, compute-sanitizer runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import vegas_ops

NATIVE = Path(__file__).with_name("native")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path_factory.mktemp("native") / "ops_test"
    library = Path(vegas_ops.__file__).with_name("libvegas.so")
    built = subprocess.run([NATIVE / "build.sh", library, program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("op", ("verify", "select", "sparse", "hostile"))
def test_op(program: Path, op: str) -> None:
    ran = subprocess.run([program, "--device", "cpu", "--op", op], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].endswith(" cases, 0 failed")


def test_one_case(program: Path) -> None:
    ran = subprocess.run([program, "--case", "3"], capture_output=True, text=True)
    assert ran.returncode == 0 and "1 cases, 0 failed" in ran.stdout


@pytest.mark.parametrize(
    "arguments", (["--op", "sorting"], ["--device", "tpu"], ["--case"], ["--case", "9999"], ["verify"])
)
def test_unknown_arguments(program: Path, arguments: list[str]) -> None:
    """Nothing that runs no case may pass for a success."""
    ran = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert ran.returncode in (1, 2), ran.stdout


def test_split_plan(tmp_path: Path) -> None:
    """The kernel that cuts keys into chunks, its threads run as threads."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, program = NATIVE / "plan" / "split_plan_test.cpp", tmp_path / "split_plan_test"
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{NATIVE.parents[1] / 'csrc'}"]
    built = subprocess.run([compiler, *flags, source, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for seed in ("1", "2", "3"):
        ran = subprocess.run([program, seed], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout
