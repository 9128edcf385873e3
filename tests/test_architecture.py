"""docs/architecture.md draws which part may use which; these are its arrows."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, SOURCES = ROOT / "vegas_ops", ROOT / "csrc"

# What a part of the package imports of the others.
PYTHON = {
    "command line": {"command line", "speculative", "models", "ops", "devices"},
    "integrations/transformers": {"speculative", "arguments"},
    "integrations/vllm": {"ops", "arguments"},
    "speculative": {"ops", "jit", "devices", "arguments"},
    "models": {"jit", "devices", "arguments"},
    "jit": set(),
    "ops": {"devices", "arguments"},
    "devices": {"arguments"},
    "arguments": set(),
    "reference": set(),
}
COMMAND_LINE = {"__main__", "cli", "demo", "plots", "session", "tune"}
# What a folder of csrc includes of the others.
NATIVE = {
    "bindings": {"include"},
    "verify": {"common", "include"},
    "select": {"common", "include"},
    "sparse": {"common", "include"},
    "common": {"include"},
    "include": set(),
}


def part_of(module: str) -> str | None:
    """The part that a module belongs to; None for the version, the build facts and the package itself."""
    names = module.split(".")[1:]
    if not names or names[0] in ("version", "_C"):
        return None
    if names[0] == "integrations":
        return f"integrations/{names[1].split('_')[0]}" if len(names) > 1 else None
    return "command line" if names[0] in COMMAND_LINE else names[0]


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.split(".")[0] == "vegas_ops"}


def test_parts_of_the_package() -> None:
    seen = set()
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")
        part = part_of(module)
        if part is None:
            continue
        assert part in PYTHON, f"{module} belongs to no part that the page draws"
        seen.add(part)
        for other in sorted(imported(path)):
            target = part_of(other)
            known = target in PYTHON and target != part  # it may be a mere name
            assert not known or target in PYTHON[part], f"{module} must not import {other}"
    assert seen == set(PYTHON)


def test_folders_of_the_library() -> None:
    for path in SOURCES.rglob("*"):
        if path.suffix not in (".h", ".cuh", ".cu", ".cpp"):
            continue
        folder = path.relative_to(SOURCES).parts[0]
        text = path.read_text()
        for other in re.findall(r'^#include "([^/"]+)/', text, re.MULTILINE):
            target = "include" if other == "vegas_ops" else other
            allowed = NATIVE[folder] | {folder}
            assert target in allowed, f"{path.relative_to(ROOT)} must not include {other}"
        foreign = re.search(r"#include <(torch|ATen|c10|pybind11|Python\.h)", text)
        assert folder == "bindings" or foreign is None, path


def test_files_can_be_read_in_a_sitting() -> None:
    for folder in (PACKAGE, SOURCES, ROOT / "tools", ROOT / "tests", ROOT / "benchmarks"):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp"):
                lines = len(path.read_text().splitlines())
                assert lines <= 600, f"{path.relative_to(ROOT)} must have at most 600 lines, got {lines}"


def test_code_that_architectures_share_asks_for_none_of_them() -> None:
    """cmake/cuda.cmake has large files of these folders compiled once for several architectures."""
    alike = {"verify": [(900, 1000, 1200)], "sparse": [(800, 860), (900, 1000, 1200)]}
    alike["common"] = alike["sparse"]
    listed = (ROOT / "cmake" / "cuda.cmake").read_text()
    assert '_sparse ${architectures} ALIKE "80 86" "90 100 120"' in listed
    compare = {"==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
    asked = 0
    for folder, groups in alike.items():
        for path in (SOURCES / folder).iterdir():
            for sign, number in re.findall(r"__CUDA_ARCH__ ([=!<>]+) (\d+)", path.read_text()):
                asked += 1
                for group in groups:
                    answers = {compare[sign](architecture, int(number)) for architecture in group}
                    assert len(answers) == 1, f"{path.name} must not tell {group} apart"
    assert asked
