#!/usr/bin/env python3
"""Assembles the project that build.toml describes, for kernel-builder of the Hugging Face kernels hub.

usage: tools/hub_project.py FOLDER

The builder compiles every source once, into one extension whose ops live in a namespace of the builder's
choice. So each CPU kernel gets a small file per instruction set, and the binding and the wrappers are
rewritten to that namespace.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Instruction sets of cmake/cpu_isa.cmake: the target that GCC compiles for, and the name.
SETS = {
    "v4": ("arch=x86-64-v4,prefer-vector-width=512", "x86-64-v4"),
    "v3": ("arch=x86-64-v3", "x86-64-v3"),
    "baseline": (None, "baseline"),
}
KERNELS = {
    "table": "common/cpu_table.cpp",
    "verify": "verify/cpu.cpp",
    "select": "select/cpu.cpp",
    "sparse": "sparse/cpu.cpp",
}

FLAKE = """{
  description = "The ops of vegas_ops";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


def replace(text: str, old: str, new: str, count: int) -> str:
    """Refuses to rewrite what has changed since this was written."""
    if text.count(old) != count:
        raise SystemExit(f"hub_project: {old!r} must occur {count} times, got {text.count(old)}")
    return text.replace(old, new)


def cpu_kernel(isa: str, source: str) -> str:
    target, name = SETS[isa]
    lines = [f"#define VEGAS_ISA {isa}", f'#define VEGAS_ISA_NAME "{name}"']
    if target:
        lines += [f'#pragma GCC target("{target}")']
    lines += [f'#include "../csrc/{source}"']
    if target:
        lines = ["#if defined(__x86_64__)", *lines, "#endif"]
    return "\n".join(lines) + "\n"


def library() -> str:
    version = re.search(r'"([\d.]+)"', (ROOT / "vegas_ops" / "version.py").read_text())
    assert version is not None
    return (
        f'#define VEGAS_VERSION "{version[1]}"\n'
        '#define VEGAS_CUDA_ARCHITECTURES "80 86 89 90 100 120"\n'
        '#include "../csrc/common/library.cpp"\n'
    )


def binding() -> str:
    text = (ROOT / "csrc" / "bindings" / "torch_ops.cpp").read_text()
    text = replace(
        text, "STABLE_TORCH_LIBRARY(vegas_ops,", "STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME,", 1
    )
    impl = "STABLE_TORCH_LIBRARY_IMPL"
    text = replace(text, f"{impl}(vegas_ops,", f"{impl}_EXPAND(TORCH_EXTENSION_NAME,", 3)
    text = replace(
        text, '#include "bindings/checks.h"\n', '#include "bindings/checks.h"\n#include "registration.h"\n', 1
    )
    return text + "\nREGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n"


# What the wrappers use of the package.
MODULES = ("arguments", "devices")


def relative(text: str) -> str:
    return re.sub(rf"^from vegas_ops\.({'|'.join(MODULES)}) import", r"from .\1 import", text, flags=re.M)


def wrappers() -> str:
    text = (ROOT / "vegas_ops" / "ops.py").read_text()
    start, end = text.index("def _load_library("), text.index("class AttentionWithDump(")
    text = text[:start] + text[end:]
    text = replace(text, "from pathlib import Path\n", "", 1)
    text = replace(
        text,
        "from torch import Tensor\n",
        "from torch import Tensor\n\nfrom ._ops import add_op_namespace_prefix, ops\n",
        1,
    )
    text, calls = re.subn(r"torch\.ops\.vegas_ops\.(\w+)([(,])", r"ops.\1\2", text)
    if calls != 6:
        raise SystemExit(f"hub_project: ops.py must call its ops in 6 places, got {calls}")
    text = relative(text)
    text = replace(text, "getattr(torch.ops.vegas_ops, name)", "getattr(ops, name)", 1)
    text = replace(text, 'f"vegas_ops::{name}"', "add_op_namespace_prefix(name)", 1)
    text = replace(text, '"vegas_ops::new_workspace"', 'add_op_namespace_prefix("new_workspace")', 1)
    text = replace(text, "    from vegas_ops import _C\n\n", "", 1)
    start = text.index("    size = _C.workspace_bytes(")
    return text[:start] + (
        "    size = torch.library.get_ctx().new_dynamic_size()\n"
        "    return like.new_empty(size, dtype=torch.uint8)\n"
    )


def main(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"hub_project: the folder must be new or empty, got {folder}")
    package = folder / "torch-ext" / "vegas_ops"
    package.mkdir(parents=True)
    (folder / "hub").mkdir()
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for name in ("build.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for isa in SETS:
        for kernel, source in KERNELS.items():
            (folder / "hub" / f"{isa}_{kernel}.cpp").write_text(cpu_kernel(isa, source))
    (folder / "hub" / "library.cpp").write_text(library())
    (folder / "flake.nix").write_text(FLAKE)
    (folder / "torch-ext" / "torch_binding.cpp").write_text(binding())
    (package / "ops.py").write_text(wrappers())
    for name in MODULES:
        (package / f"{name}.py").write_text(relative((ROOT / "vegas_ops" / f"{name}.py").read_text()))
    (package / "__init__.py").write_text(
        '"""The three ops of verification-guided self-speculative decoding."""\n\n'
        "from .ops import *\nfrom .ops import __all__\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
