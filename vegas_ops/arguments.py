"""Checks of arguments, whose errors name them: "`argument` must be ..., got ..."."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_integer(name: str, value: Any, least: int | None = None) -> None:
    """Of Python, NumPy or a compiled graph (`torch.SymInt`), at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, Integral, torch.SymInt)):
        raise TypeError(f"`{name}` must be an integer, got {_short(value)}")
    if least is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")


def check_integers(least: int, **arguments: Any) -> None:
    for name, value in arguments.items():
        check_integer(name, value, least)


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (float, Real, torch.SymFloat)):
        raise TypeError(f"`{name}` must be a number, got {_short(value)}")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """what: what the kind is called in the error, with its article."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {what}, got {_short(value)}")


def check_callable(name: str, value: Any) -> None:
    """Or None."""
    if value is not None and not callable(value):
        raise TypeError(f"`{name}` must be callable, got {_short(value)}")


def check_dtype(name: str, value: Any) -> None:
    check_kind(name, value, torch.dtype, "a torch.dtype, such as torch.bfloat16")


def check_tensors(**arguments: Any) -> None:
    for name, value in arguments.items():
        check_kind(name, value, Tensor, "a tensor")


def lookup(table: dict[str, int], value: Any, name: str) -> int:
    """What stands for one of a few words."""
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"`{name}` must be one of {', '.join(table)}, got {_short(value)}")
    return table[value]


def call(op: Any, *arguments: Any) -> Any:
    """Calls a registered torch op; where torch refuses the type of an argument, so does the error here."""
    try:
        return op(*arguments)
    except RuntimeError as error:
        if "Expected a value of type" not in str(error):  # of an argument
            raise
        try:
            for argument, value in zip(op.default._schema.arguments, arguments, strict=True):
                _check_type(argument, value)
        except (TypeError, ValueError) as refusal:
            raise refusal from None
        raise


# Arguments of the torch ops that come from one of another name.
_PARTS = {
    "k_per_request": "k",
    "pool_before": "pool",
    "pool_after": "pool",
    "window_left": "window_size",
    "window_right": "window_size",
}


def _check_type(argument: Any, value: Any) -> None:
    name, kind = _PARTS.get(argument.name, argument.name), str(argument.type)
    if kind.startswith("Optional[") and value is None:
        return
    kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "int":
        check_integer(name, value)
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"`{name}` must fit 64 bits, got {value}")
    elif kind == "float":
        check_number(name, value)
    elif kind == "bool":
        check_kind(name, value, bool, "a bool")
    elif kind == "Tensor":
        check_kind(name, value, Tensor, "a tensor")


def _short(value: Any) -> str:
    """Its value where that is short, else its type."""
    short = isinstance(value, (str, int, float, list)) or value is None
    return f"{value!r:.60}" if short else type(value).__name__
