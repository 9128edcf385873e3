"""What others build on changes on purpose alone: names and signatures are those of tests/interface.txt.

`python tests/test_interface.py` writes the file anew. What a line takes that is new, changed or gone:
docs/releasing.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pytest
import torch

from vegas_ops import cli, ops
from vegas_ops.version import __version__

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("interface.txt")
MODULES = ("vegas_ops", "vegas_ops.models", "vegas_ops.speculative", "vegas_ops.integrations.transformers")


def signature(function: Any) -> str:
    """Names, kinds and defaults of the arguments; annotations may become more precise."""
    parameters = [
        p.replace(annotation=p.empty, default=_Shown(p.default) if p.default is not p.empty else p.empty)
        for p in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


class _Shown:
    """A default, as every process would print it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        plain = isinstance(self.value, (bool, int, float, str, tuple, type(None)))
        return repr(self.value) if plain else f"<{type(self.value).__name__}>"


def python_names() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            value, path = getattr(module, name), f"{module_name}.{name}"
            if get_origin(value) is not None:
                yield f"{path}: alias of a type"
            elif inspect.isclass(value):
                yield from class_names(value, path)
            elif inspect.isfunction(value):
                yield f"{path}{signature(value)}"
            else:
                yield f"{path}: {type(value).__name__}"


def class_names(kind: type, path: str) -> Iterator[str]:
    """What the class adds to its bases."""
    bases = [c for c in kind.__mro__ if c.__module__ not in ("builtins", "abc", "typing")]
    own = all(c.__module__.startswith("vegas_ops") for c in bases) and kind.__init__ is not object.__init__
    constructed = (
        own and not issubclass(kind, (tuple, Exception)) and not getattr(kind, "_is_protocol", False)
    )
    yield f"{path}{signature(kind) if constructed else ''}"
    for name in sorted({*vars(kind), *getattr(kind, "__annotations__", ())}):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        yield f"{path}.{name}{signature(member) if inspect.isfunction(member) else ''}"


def torch_ops() -> Iterator[str]:
    """Schemas: engines and exported programs call these by name."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("vegas_ops::"):
            yield str(schema)


def c_interface() -> Iterator[str]:
    """Fields in their order, which is that in memory, and functions."""
    for header in ("params.h", "api.h"):
        text = (ROOT / "csrc" / "include" / "vegas_ops" / header).read_text()
        text = re.sub(r"//[^\n]*|^\s*#[^\n]*", "", text, flags=re.MULTILINE)
        text = re.sub(r"\s+", " ", text)
        for kind, fields, name in re.findall(r"(struct|enum) \{ ?([^}]*?),? ?\} ?(\w*) ?;", text):
            for field in re.split(r"; ?" if kind == "struct" else r", ?", fields.rstrip("; ")):
                yield f"{name or 'enum'}: {field}"
        yield from re.findall(r"VEGAS_API ([^;]*);", text)


def command_line() -> Iterator[str]:
    for action in cli._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                for option in parser._actions:
                    for flag in option.option_strings[-1:]:
                        yield f"vegas-ops {name} {flag}"


def interface() -> list[str]:
    return [*python_names(), *sorted(torch_ops()), *c_interface(), *command_line()]


def test_the_interface_is_what_the_file_says() -> None:
    pytest.importorskip("transformers")
    known, found = FILE.read_text().splitlines(), interface()
    gone = [line for line in known if line not in found]
    new = [line for line in found if line not in known]
    assert not gone, "gone or changed, which takes a new version and tests/interface.txt written anew"
    assert not new, "new: write tests/interface.txt anew with `python tests/test_interface.py`"
    assert known == found and len(set(found)) == len(found)


def test_everything_public_is_there() -> None:
    text = FILE.read_text()
    for name in ops.__all__:
        assert f"vegas_ops.{name}" in text
    for name in (
        "flash_attn_with_logit_dump",
        "topk_aggregate_logits",
        "aggregate_logits",
        "sparse_paged_decode",
    ):
        assert f"\nvegas_ops::{name}(" in text
    header = (ROOT / "csrc" / "include" / "vegas_ops" / "api.h").read_text()
    functions = re.findall(r"\b(vegas_\w+)\(", header)
    assert functions and all(f" {function}(" in text for function in functions)
    for field in (
        "VegasVerifyParams: const void* q",
        "VegasBounds: int32_t max_k",
        "VegasOp: VEGAS_OP_SELECT = 1",
    ):
        assert f"\n{field}\n" in text


def test_the_version_is_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


if __name__ == "__main__":
    FILE.write_text("\n".join(interface()) + "\n")
