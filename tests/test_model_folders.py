"""Model folders come from anywhere: whatever is in them, loading ends with a model or names the file."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_qwen3 import CONFIG, save_folder

from vegas_ops.models import ModelFolderError, Qwen3Config, Qwen3Model, Tokenizer
from vegas_ops.models.weights import SafetensorsFolder
from vegas_ops.session import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model."""
    folder = tmp_path_factory.mktemp("model")
    save_folder(folder, CONFIG)
    return folder


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file that says of itself whatever it is told to."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"", b"", None),
        (b"{}", b"", 1 << 40),  # a header longer than the file
        (b"{}", b"", (1 << 64) - 1),
        (b"[]", b"", None),
        (b"[" * 100_000, b"", None),
        (b"\xff\xfe{}", b"", None),
        ({"a": entry()}, b"", None),  # data cut off
        ({"a": entry()}, b"\0" * 9, None),  # data behind the last tensor
        ({"a": entry(shape=(3,))}, b"\0" * 8, None),  # a shape of other bytes
        ({"a": entry(shape=(1 << 62, 4), offsets=(0, 0))}, b"", None),  # a size that overflows
        ({"a": entry(shape=(-2,))}, b"\0" * 8, None),
        ({"a": entry(offsets=(8, 0))}, b"\0" * 8, None),
        ({"a": entry(offsets=(4, 12))}, b"\0" * 12, None),  # a hole before the first tensor
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12, None),  # tensors that overlap
        ({"a": entry(dtype="F33")}, b"\0" * 8, None),
        ({"a": 3}, b"", None),
        ({"__metadata__": 3, "a": entry()}, b"\0" * 8, None),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: object, data: bytes, length: int | None) -> None:
    write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(ModelFolderError, match=r"model\.safetensors: must be a safetensors file"):
        SafetensorsFolder(tmp_path)


def test_a_shape_is_looked_at_before_its_data(folder: Path, tmp_path: Path) -> None:
    """Nothing is allocated for what the config says of the weights."""
    values = json.loads((folder / "config.json").read_text())
    header = {"model.norm.weight": entry(shape=(1 << 14,), offsets=(0, 1 << 16))}
    write(tmp_path / "model.safetensors", header, bytes(1 << 16))
    large = {"vocab_size": 1 << 24, "hidden_size": 1 << 24, "intermediate_size": 1 << 24}
    (tmp_path / "config.json").write_text(json.dumps(values | large))
    with pytest.raises(ModelFolderError, match="must hold the tensor"):
        Qwen3Model.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1 << 20}, "`num_hidden_layers` must be an integer in"),
        ({"max_position_embeddings": 1 << 24}, "`max_position_embeddings` must be an integer in"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e12}}, "`factor` must leave at most"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "`factor` must be a finite number"),
        ({"rope_theta": float("inf")}, "`rope_theta` must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a finite number"),
        ({"layer_types": 3}, "`layer_types` must all be"),
        ({"dtype": ["float32"]}, "`dtype` must be one of"),
        ({"hidden_act": "x" * 100_000}, "`hidden_act` must be 'silu'"),
    ],
)
def test_sizes_of_a_config(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ModelFolderError) as error:
        Qwen3Config.from_folder(tmp_path)
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"9" * 10_000, "must be JSON"),
        ("config.json", b"[" * 100_000, "must be JSON"),
        ("config.json", b"\xff", "must be JSON"),
        ("config.json", b" " * (1 << 20) + b"{}", "must be at most 1048576 bytes"),
        ("generation_config.json", b"{", "must be JSON"),
        ("tokenizer.json", b"{}", "must be a tokenizer"),
        ("tokenizer.json", (DEMO_MODEL / "tokenizer.json").read_bytes()[:-1000], "must be a tokenizer"),
    ],
)
def test_files_that_cannot_be_read(
    folder: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFolderError) as error:
        Tokenizer(tmp_path) if name == "tokenizer.json" else Qwen3Config.from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name}: {message}") and len(str(error.value)) < 1000


def test_a_tokenizer_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no block is written
    with pytest.raises(ModelFolderError, match="must be at most 268435456 bytes, got 1099511627776"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ("config.json", "model.safetensors", "tokenizer.json"))
def test_links_stay_in_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    """A folder that was downloaded must not name other files of the machine."""
    source = DEMO_MODEL if name == "tokenizer.json" else folder
    model = tmp_path / "model"
    save_folder(model, CONFIG)
    (model / name).unlink(missing_ok=True)

    def load() -> None:
        Tokenizer(model) if name == "tokenizer.json" else Qwen3Model.from_pretrained(model)

    (tmp_path / "outside").write_bytes((source / name).read_bytes())
    (model / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ModelFolderError, match=f"{name}: must be a file of .*, got a link to"):
        load()
    (model / "inside").write_bytes((source / name).read_bytes())
    (model / name).unlink()
    (model / name).symlink_to("inside")
    load()
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    with pytest.raises(ModelFolderError, match=f"{name}|must hold model.safetensors"):
        load()
    (model / name).unlink()
    os.mkfifo(model / name)  # opening it would wait for ever
    with pytest.raises(ModelFolderError, match=f"{name}|must hold model.safetensors"):
        load()


def test_links_of_the_hugging_face_cache(folder: Path, tmp_path: Path) -> None:
    """A snapshot there is made of links to files beside it, of the same model."""
    model = tmp_path / "models--org--name" / "snapshots" / "revision"
    blobs = tmp_path / "models--org--name" / "blobs"
    model.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (blobs / name).write_bytes((folder / name).read_bytes())
        (model / name).symlink_to(Path("../../blobs") / name)
    assert Qwen3Model.from_pretrained(model).num_layers == CONFIG.num_layers
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(ModelFolderError, match=r"must be a file of .*models--org--name, got a link to"):
        Qwen3Model.from_pretrained(model)


def test_pickles_are_never_opened(folder: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((folder / "config.json").read_bytes())
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors"):
        (model / name).write_bytes(pickle.dumps(Payload()))
        with pytest.raises(ModelFolderError, match=r"must (hold model|be a)\.?[ ]?safetensors"):
            Qwen3Model.from_pretrained(model)
    assert not (tmp_path / "executed").exists()
    for source in (ROOT / "vegas_ops").rglob("*.py"):
        text, forbidden = source.read_text(), ("import pickle", "torch.load", "trust_remote_code")
        assert not any(name in text for name in forbidden), source


@given(st.data())
def test_any_damage_to_the_weights(folder: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Bytes of the header and lengths of the file at random: a model, or an error with the file's name."""
    model = tmp_path_factory.mktemp("damaged")
    (model / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(weights[:8], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        weights[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del weights[data.draw(st.integers(0, len(weights))) :]
    (model / "model.safetensors").write_bytes(weights)
    try:
        Qwen3Model.from_pretrained(model)
    except ModelFolderError as error:
        assert str(model) in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_in_a_config(folder: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    model = tmp_path_factory.mktemp("odd")
    values = json.loads((folder / "config.json").read_text())
    names = [*values, "rope_parameters", "quantization_config", "layer_types", "generation"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        values[name] = data.draw(JSON)
    (model / "config.json").write_text(json.dumps(values))
    try:
        Qwen3Config.from_folder(model)
    except ModelFolderError as error:
        assert str(model / "config.json") in str(error)
