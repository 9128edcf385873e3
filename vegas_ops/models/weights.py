"""Tensors of a Hugging Face folder, from one safetensors file or from shards. No pickle, ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

import torch

from vegas_ops.arguments import check_kind
from vegas_ops.models.config import ModelFolderError, check_file, read_json


class SafetensorsFolder:
    """Names, shapes and tensors of `model.safetensors` or `model.safetensors.index.json`.

    Shard names come from a downloaded file, so only plain names of files in the folder are taken. Tensors are
    read one at a time from the mapped file, and only once their shapes are what the config says.
    """

    def __init__(self, folder: str | Path) -> None:
        check_kind("folder", folder, (str, PathLike), "a folder")
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ModelFolderError(f"`folder` must be a directory, got {str(folder)!r}")
        self._shard_of = self._read_index()

    def _read_index(self) -> dict[str, Path]:
        single, index = (self.folder / name for name in ("model.safetensors", "model.safetensors.index.json"))
        if not index.is_file():
            if not single.is_file():
                raise ModelFolderError(
                    f"{self.folder}: must hold model.safetensors or model.safetensors.index.json "
                    "(other weight formats are not read)"
                )
            check_file(single)
            return {name: single for name in self._names(single)}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFolderError(f"{index}: `weight_map` must be an object, got {weight_map!r:.80}")
        shards: dict[str, list[str]] = defaultdict(list)
        for name, shard in weight_map.items():
            if (
                not isinstance(shard, str)
                or not shard.endswith(".safetensors")
                or any(character in shard for character in "/\\\0:")
            ):
                raise ModelFolderError(
                    f"{index}: a shard must be a file of the folder, *.safetensors, got {shard!r:.80}"
                )
            shards[shard].append(name)
        for shard, names in shards.items():
            if not (self.folder / shard).is_file():
                raise ModelFolderError(f"{self.folder / shard}: no such file, named by {index}")
            check_file(self.folder / shard)
            absent = min(set(names) - set(self._names(self.folder / shard)), default=None)
            if absent is not None:
                raise ModelFolderError(f"{self.folder / shard}: must hold {absent!r:.80}, named by {index}")
        return {name: self.folder / shard for name, shard in weight_map.items()}

    def _open(self, path: Path):  # type: ignore[no-untyped-def]  # safetensors ships no types
        try:
            from safetensors import safe_open
        except ImportError:
            raise ModelFolderError("loading weights needs `pip install safetensors`") from None
        try:
            return safe_open(str(path), framework="pt")
        except Exception as error:  # SafetensorError, OSError: cut off, or not this format
            raise ModelFolderError(f"{path}: must be a safetensors file, got {error}") from None

    def _names(self, path: Path) -> list[str]:
        with self._open(path) as file:
            return list(file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def read(
        self, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The named tensors, on the CPU in `dtype`; their shapes must be the given ones."""
        wanted = dict(shapes)
        missing = [name for name in wanted if name not in self._shard_of]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelFolderError(f"{self.folder}: must hold the tensor {missing[0]!r}{more}")
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in wanted:
            by_file[self._shard_of[name]].append(name)
        tensors: dict[str, torch.Tensor] = {}
        for path, names in by_file.items():
            with self._open(path) as file:
                for name in names:
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != wanted[name]:
                        raise ModelFolderError(
                            f"{path}: {name!r} must have shape {wanted[name]}, got {shape}"
                        )
                    tensor = file.get_tensor(name)
                    if not tensor.is_floating_point():
                        raise ModelFolderError(f"{path}: {name!r} must be floating point, got {tensor.dtype}")
                    tensors[name] = tensor.to(dtype)
        return tensors
