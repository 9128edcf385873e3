"""Hugging Face `config.json` of a Qwen3 dense decoder, read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from vegas_ops.arguments import check_dtype, check_kind

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MAX_CONFIG_BYTES = 1 << 20
_MAX_LAYERS = 1 << 10  # each is named in a list before the weights are looked at
_MAX_POSITION = 1 << 21  # tokens; the table of RoPE has a row for each


class ModelFolderError(ValueError):
    """A model folder that cannot be loaded; the message names the file and the field."""


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise ModelFolderError(f"`{name}` must be a finite number, got {value!r:.80}")
    return float(value)


@dataclass(frozen=True)
class RopeScaling:
    """`rope_scaling` of a config: plain (`default`), `linear` or `yarn` (arXiv 2309.00071)."""

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # tokens; 0: the config's own max_position_embeddings
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "yarn"):
            raise ModelFolderError(
                f"`rope_type` must be 'default', 'linear' or 'yarn', got {self.kind!r:.80}"
            )
        for name in ("factor", "original_max_position", "beta_fast", "beta_slow"):
            _number(name, getattr(self, name))
        if self.attention_factor is not None:
            _number("attention_factor", self.attention_factor)


@dataclass(frozen=True)
class Qwen3Config:
    """Shape of a Qwen3 dense decoder. `max_position` counts tokens, extension by YaRN included."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling = RopeScaling()
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads_q", "num_heads_kv"):
            _check_count(name, getattr(self, name), 1 << 24)
        _check_count("num_layers", self.num_layers, _MAX_LAYERS)
        _check_count("head_dim", self.head_dim, 1 << 24)
        _check_count("max_position", self.max_position, _MAX_POSITION)
        if self.num_heads_q % self.num_heads_kv:
            raise ModelFolderError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads` "
                f"({self.num_heads_kv}), got {self.num_heads_q}"
            )
        if self.head_dim % 2:
            raise ModelFolderError(f"`head_dim` must be even, got {self.head_dim}")
        _number("rms_norm_eps", self.rms_norm_eps)
        _number("rope_theta", self.rope_theta)
        check_kind("rope_scaling", self.rope_scaling, RopeScaling, "a RopeScaling")
        check_dtype("dtype", self.dtype)
        check_kind("eos_token_ids", self.eos_token_ids, tuple, "a tuple of token ids")
        if not self.rms_norm_eps > 0:
            raise ModelFolderError(f"`rms_norm_eps` must be positive, got {self.rms_norm_eps}")
        if not self.rope_theta > 1:
            raise ModelFolderError(f"`rope_theta` must exceed 1, got {self.rope_theta}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Qwen3Config:
        """Reads the fields of a Hugging Face config (old `rope_scaling` or new `rope_parameters`).

        Raises ModelFolderError, naming the field, for anything this runner would compute wrongly.
        """
        check_kind("values", values, Mapping, "what config.json holds")
        if values.get("model_type") != "qwen3":
            raise ModelFolderError(
                f"`model_type` must be 'qwen3', got {values.get('model_type')!r:.80}; "
                "vegas_ops.integrations.transformers runs many others"
            )
        if values.get("use_sliding_window"):
            raise ModelFolderError("`use_sliding_window` must be false, got true")
        layer_types = values.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise ModelFolderError(f"`layer_types` must all be 'full_attention', got {layer_types!r:.80}")
        if values.get("hidden_act", "silu") != "silu":
            raise ModelFolderError(f"`hidden_act` must be 'silu', got {values['hidden_act']!r:.80}")
        if values.get("quantization_config"):
            raise ModelFolderError("`quantization_config` must be absent, got a quantized model")

        def count(name: str, default: int | None = None, limit: int = 1 << 24) -> int:
            return _check_count(name, values.get(name, default), limit)

        hidden_size = count("hidden_size")
        num_heads_q = count("num_attention_heads")
        position = count("max_position_embeddings", limit=_MAX_POSITION)
        head_dim = values.get("head_dim") or hidden_size // num_heads_q
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        scaling = _rope_scaling(rope, position)
        if scaling.kind != "default":
            original = scaling.original_max_position
            position = max(position, int(scaling.factor * original))
            if position > _MAX_POSITION:
                raise ModelFolderError(
                    f"`factor` must leave at most {_MAX_POSITION} positions, "
                    f"got {scaling.factor} times {original}"
                )
        dtype_name = values.get("dtype") or values.get("torch_dtype") or "float32"
        if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
            raise ModelFolderError(f"`dtype` must be one of {sorted(_DTYPES)}, got {dtype_name!r:.80}")
        theta = rope.get("rope_theta", values.get("rope_theta", 1e4))
        return cls(
            vocab_size=count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count("intermediate_size"),
            num_layers=count("num_hidden_layers", limit=_MAX_LAYERS),
            num_heads_q=num_heads_q,
            num_heads_kv=count("num_key_value_heads", num_heads_q),
            head_dim=_check_count("head_dim", head_dim, 1024),
            max_position=position,
            rms_norm_eps=_number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
            rope_theta=_number("rope_theta", theta),
            rope_scaling=scaling,
            attention_bias=bool(values.get("attention_bias", False)),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            dtype=_DTYPES[dtype_name],
            eos_token_ids=_token_ids(values.get("eos_token_id")),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Qwen3Config:
        """Reads `config.json`, and the end-of-text ids of `generation_config.json` if there is one."""
        check_kind("folder", folder, (str, PathLike), "a folder")
        folder = Path(folder)
        values = read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
            if generation.get("eos_token_id") is not None:
                values["eos_token_id"] = generation["eos_token_id"]
        try:
            return cls.from_dict(values)
        except ModelFolderError as error:
            raise ModelFolderError(f"{folder / 'config.json'}: {error}") from None


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """ModelFolderError unless it is a regular file of its folder, of at most so many bytes.

    A link may lead to a file of the folder, or, in a snapshot of the Hugging Face cache, to one of the same
    cached model: a folder that was downloaded names no other file of this machine.
    """
    if not path.is_file():
        raise ModelFolderError(f"{path}: no such file; is this a Hugging Face model folder?")
    folder, target = path.parent.resolve(), path.resolve()
    cached = folder.parents[1] if folder.parent.name == "snapshots" else folder
    home = cached if cached.name.startswith("models--") else folder
    if home not in target.parents:
        raise ModelFolderError(f"{path}: must be a file of {home}, got a link to {target}")
    size = target.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise ModelFolderError(f"{path}: must be at most {max_bytes} bytes, got {size}")


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file; ModelFolderError, naming the path, for anything else."""
    limit = _MAX_CONFIG_BYTES * (64 if path.name.endswith(".index.json") else 1)
    check_file(path, limit)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFolderError(f"{path}: must be readable, got {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of UTF-8, JSON, and integers without end
        raise ModelFolderError(f"{path}: must be JSON, got {error}") from None
    if not isinstance(values, dict):
        raise ModelFolderError(f"{path}: must be a JSON object, got {type(values).__name__}")
    return values


def _check_count(name: str, value: Any, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        raise ModelFolderError(f"`{name}` must be an integer in [1, {limit}], got {value!r:.80}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelFolderError(f"`eos_token_id` must be token ids, got {value!r:.80}")
    return tuple(ids)


def _rope_scaling(rope: Any, max_position: int) -> RopeScaling:
    if not isinstance(rope, Mapping):
        raise ModelFolderError(f"`rope_scaling` must be an object, got {rope!r:.80}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ModelFolderError(f"`rope_type` must be 'default', 'linear' or 'yarn', got {kind!r:.80}")
    factor = _number("factor", rope.get("factor"))
    if not factor >= 1:
        raise ModelFolderError(f"`factor` must be at least 1, got {factor}")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ModelFolderError("`mscale` must be absent, got a value (no Qwen3 model uses it)")
    attention_factor = rope.get("attention_factor")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=_check_count(
            "original_max_position_embeddings",
            rope.get("original_max_position_embeddings") or max_position,
            1 << 24,
        ),
        attention_factor=(
            None if attention_factor is None else _number("attention_factor", attention_factor)
        ),
        beta_fast=_number("beta_fast", rope.get("beta_fast") or 32),
        beta_slow=_number("beta_slow", rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )
