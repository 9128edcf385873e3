"""build.toml and the project that tools/hub_project.py makes for it: complete, and its CPU half works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import vegas_ops

if sys.version_info < (3, 11):
    pytest.skip("reads TOML with Python 3.11's tomllib", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[1]
# What the builder's documentation lists for a kernel.
KERNEL_KEYS = {"backend", "depends", "include", "src", "cxx-flags", "cuda-capabilities", "cuda-flags"}
# The builder writes these two files itself; here in their simplest form.
REGISTRATION = """#pragma once
#include <Python.h>
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, M) STABLE_TORCH_LIBRARY(NAME, M)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, KEY, M) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, M)
#define REGISTER_EXTENSION(NAME)                                                            \\
  PyMODINIT_FUNC PyInit__hub_ops(void) {                                                    \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_hub_ops", nullptr, 0, nullptr};   \\
    return PyModule_Create(&module);                                                        \\
  }
"""
OPS = """import torch

from . import _hub_ops

ops = torch.ops._hub_ops


def add_op_namespace_prefix(name):
    return f"_hub_ops::{name}"
"""
# A round with either package; what it computes is kept in a file.
ROUND = """
import sys
import torch
import vegas_ops as v

g = torch.Generator().manual_seed(0)
k, value = torch.randn(2, 38, 16, 2, 64, generator=g)
table = torch.randperm(38, generator=g, dtype=torch.int32).view(2, 19)
seqused_k = torch.tensor([300, 77], dtype=torch.int32)
q = torch.randn(8, 8, 64, generator=g)
out, lse, logits, _ = v.flash_attn_with_logit_dump(
    q, k, value, table, seqused_k, cu_seqlens_q=torch.tensor([0, 4, 8], dtype=torch.int32),
    max_seqlen_q=4, max_seqlen_k=300,
)
options = {"dump": "token", "seqlens": seqused_k - 3, "max_k": 32}
slots, length = v.topk_aggregate_logits(logits, k=32, block_table=table, page_size=16, **options)
draft, _ = v.sparse_paged_decode(
    q[:2], k, value, slots, length, tail_start=seqused_k - 3, seqused_k=seqused_k, block_table=table
)
listed_only = lambda x: v.sparse_paged_decode(x, k, value, slots, length)[0]
compiled = torch.compile(listed_only, backend="eager", fullgraph=True)
torch.save([out, lse, slots, length, draft, compiled(q[:2])], sys.argv[1])
print(v.__file__)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "project"
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "hub_project.py", folder], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def build(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "build.toml").read_text())


def test_every_source_of_the_library_is_built(project: Path, build: dict[str, Any]) -> None:
    assert set(build) == {"general", "torch", "kernel"}
    given: dict[str, list[str]] = {"cpu": [], "cuda": []}
    for kernel in build["kernel"].values():
        assert set(kernel) <= KERNEL_KEYS
        given[kernel["backend"]] += kernel["src"]
    # A file with other flags in another section of the same variant would get them both.
    assert all(len(files) == len(set(files)) for files in given.values())
    for files in (*given.values(), build["torch"]["src"]):
        assert all((project / name).is_file() for name in files)
    wanted = set(re.findall(r"csrc/\S+?\.(?:cpp|cu)", (ROOT / "CMakeLists.txt").read_text()))
    wanted -= {"csrc/bindings/module.cpp", "csrc/bindings/torch_ops.cpp"}
    for backend, suffixes in (("cpu", (".cpp",)), ("cuda", (".cpp", ".cu"))):
        included = "".join((project / name).read_text() for name in given[backend] if name.startswith("hub/"))
        have = set(given[backend]) | {f"csrc/{name}" for name in re.findall(r"\.\./csrc/(\S+?)\"", included)}
        missing = {name for name in wanted if name.endswith(suffixes)} - have
        if backend == "cpu":
            missing = {name for name in missing if not name.endswith("/cuda.cpp")}
        assert not missing, f"a `{backend}` section of build.toml must list {sorted(missing)}"


def test_the_folder_must_be_new(project: Path) -> None:
    again = subprocess.run(
        [sys.executable, ROOT / "tools" / "hub_project.py", project], capture_output=True, text=True
    )
    assert again.returncode != 0 and "must be new or empty" in again.stderr


def test_the_cpu_variant_computes_what_the_package_does(
    project: Path, build: dict[str, Any], tmp_path: Path
) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (project / "registration.h").write_text(REGISTRATION)
    package = project / "torch-ext" / "vegas_ops"
    (package / "_ops.py").write_text(OPS)
    torch_dir = Path(torch.__file__).parent
    binding = {
        "src": build["torch"]["src"],
        "include": [*build["torch"]["include"], ".", torch_dir / "include", sysconfig.get_paths()["include"]],
        "cxx-flags": ["-DTORCH_EXTENSION_NAME=_hub_ops"],
    }
    objects = []
    for section in [binding, *(k for k in build["kernel"].values() if k["backend"] == "cpu")]:
        flags = [flag.replace("-O3", "-O1") for flag in section.get("cxx-flags", [])]
        includes = [f"-I{folder}" for folder in section["include"]]
        for source in section["src"]:
            objects.append(str(tmp_path / source.replace("/", "_")) + ".o")
            command = [compiler, "-std=c++17", "-fPIC", "-c", source, *flags, *includes, "-o", objects[-1]]
            built = subprocess.run(command, cwd=project, capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
    libraries = [f"-L{torch_dir / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    command = [compiler, "-shared", *objects, *libraries, "-o", str(package / "_hub_ops.abi3.so")]
    subprocess.run(command, check=True)
    results = []
    for path in (project / "torch-ext", Path(vegas_ops.__file__).parents[1]):
        kept = tmp_path / f"{path.name}.pt"
        env = {**os.environ, "PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
        ran = subprocess.run(
            [sys.executable, "-c", ROUND, kept], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith(str(path))
        results.append(torch.load(kept))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
