"""The C interface of libvegas.so, called as a binding in another language calls it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import vegas_ops

OPS = (
    "vegas_flash_attn_with_logit_dump",
    "vegas_topk_aggregate_logits",
    "vegas_aggregate_logits",
    "vegas_sparse_paged_decode",
)
CPU, CUDA = 0, 1
INVALID_ARGUMENT = 1


LIBRARY = Path(vegas_ops.__file__).with_name("libvegas.so")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.vegas_last_error.restype = ctypes.c_char_p
    for op in OPS:
        getattr(library, op).argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return library


def refused(library: ctypes.CDLL, op: str, params: ctypes.Array[ctypes.c_char] | None, device: int) -> str:
    """The message of a call that must be refused."""
    assert getattr(library, op)(params, device, None) == INVALID_ARGUMENT
    return str(library.vegas_last_error().decode())


@pytest.mark.parametrize("device", (CPU, CUDA))
@pytest.mark.parametrize("op", OPS)
def test_no_parameters(library: ctypes.CDLL, op: str, device: int) -> None:
    assert "`params`" in refused(library, op, None, device)


@pytest.mark.parametrize("device", (-1, 2))
@pytest.mark.parametrize("op", OPS)
def test_unknown_device(library: ctypes.CDLL, op: str, device: int) -> None:
    assert "`device`" in refused(library, op, ctypes.create_string_buffer(4096), device)


@pytest.mark.parametrize(
    ("op", "device", "argument"),
    (
        ("vegas_flash_attn_with_logit_dump", CPU, "`k_cache`"),
        ("vegas_flash_attn_with_logit_dump", CUDA, "`q` must be bfloat16 or float16"),
        ("vegas_topk_aggregate_logits", CPU, "`dump`"),
        ("vegas_topk_aggregate_logits", CUDA, "`dump`"),
        ("vegas_aggregate_logits", CPU, "`dump`"),
        ("vegas_aggregate_logits", CUDA, "`dump`"),
        ("vegas_sparse_paged_decode", CPU, "`k_cache`"),
        ("vegas_sparse_paged_decode", CUDA, "`q` must be bfloat16 or float16"),
    ),
)
def test_zeroed_parameters(library: ctypes.CDLL, op: str, device: int, argument: str) -> None:
    assert argument in refused(library, op, ctypes.create_string_buffer(4096), device)


def test_instruction_sets_share_no_code() -> None:
    """The linker keeps one copy of a template of the standard library, whatever set it was compiled for."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    listed = subprocess.run([nm, "-C", "--defined-only", LIBRARY], capture_output=True, text=True, check=True)
    symbols = [line.split(maxsplit=2)[1:] for line in listed.stdout.splitlines()]
    code = [name for kind, name in symbols if kind in "tTwW"]
    if not any("vegas_ops::baseline::" in name for name in code):
        pytest.skip("the library's symbols were stripped")
    # cuda::std is the CUDA headers' own, and never compiled for an instruction set.
    assert not [name for name in code if re.search(r"(?<![\w:])(std|__gnu_cxx)::", name)]


@pytest.mark.parametrize("flags", (["-O0"], ["-O2", "-Wall", "-Wextra", "-Werror", "-pedantic-errors"]))
def test_the_c_example_runs(tmp_path: Path, flags: list[str]) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("needs a C compiler")
    root, program = Path(__file__).resolve().parents[1], tmp_path / "round"
    source, rpath = root / "examples" / "c" / "round.c", f"-Wl,-rpath,{LIBRARY.parent}"
    command = [compiler, "-std=c11", *flags, f"-I{root / 'csrc' / 'include'}", source, LIBRARY, "-lm", rpath]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("error") == 3 and "refused: `softmax_scale`" in ran.stdout
