"""The Qwen3 runner against transformers, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vegas_ops.models import ModelFolderError, Qwen3Config, Qwen3Model, RopeScaling, Tokenizer
from vegas_ops.models.linear import Linear
from vegas_ops.models.qwen3 import parameter_shapes
from vegas_ops.models.rope import rope_table
from vegas_ops.session import DEMO_MODEL

safetensors_torch = pytest.importorskip("safetensors.torch")

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads_q=6,
    num_heads_kv=2,
    head_dim=16,
    max_position=128,
    rope_theta=1e4,
)


class DenseAttend:
    """Causal attention of one sequence over everything appended so far."""

    def __init__(self, num_layers: int) -> None:
        self.k: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.v: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.k[layer].append(k.clone())
        self.v[layer].append(v.clone())
        keys, values = torch.cat(self.k[layer]), torch.cat(self.v[layer])
        mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


class RowwiseAttend(DenseAttend):
    """The same, one row at a time, so that attention cannot depend on the number of rows."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [
            super(RowwiseAttend, self).__call__(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1])
            for i in range(len(q))
        ]
        return torch.cat(rows)


def logits_of(model: Qwen3Model, ids: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    attend, done, logits = DenseAttend(model.num_layers), 0, []
    for size in chunks:
        part = ids[done : done + size]
        positions = torch.arange(done, done + len(part))
        logits.append(model.compute_logits(model.forward(part, positions, attend)))
        done += len(part)
    assert done == len(ids)
    return torch.cat(logits)


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def save_folder(folder: Path, config: Qwen3Config, shards: int = 1) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with random weights."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in parameter_shapes(config):
        value = torch.randn(shape, generator=generator)
        scale = shape[1] ** -0.5 if len(shape) == 2 else 0.1
        tensors[name] = value * scale + (1 if name.endswith("norm.weight") else 0)
    rope: dict[str, Any] | None = None
    if config.rope_scaling.kind != "default":
        rope = {
            "rope_type": config.rope_scaling.kind,
            "factor": config.rope_scaling.factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_position,
        }
        if config.rope_scaling.attention_factor is not None:
            rope["attention_factor"] = config.rope_scaling.attention_factor
    values = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads_q,
        "num_key_value_heads": config.num_heads_kv,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "float32",
        "eos_token_id": 5,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if shards == 1:
        safetensors_torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        safetensors_torch.save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


VARIANTS = {
    "plain": CONFIG,
    "tied": replace(CONFIG, tie_word_embeddings=True),
    "bias": replace(CONFIG, attention_bias=True),
    "long-mlp": replace(CONFIG, intermediate_size=2100),
    "linear": replace(
        CONFIG, rope_scaling=RopeScaling("linear", 2.0, original_max_position=64), max_position=128
    ),
    "yarn": replace(
        CONFIG, rope_scaling=RopeScaling("yarn", 4.0, original_max_position=32), max_position=128
    ),
    "yarn-attention-factor": replace(
        CONFIG,
        rope_scaling=RopeScaling("yarn", 2.0, original_max_position=64, attention_factor=1.25),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(tmp_path: Path, variant: str) -> None:
    config = VARIANTS[variant]
    save_folder(tmp_path, config)
    reference = transformers_model(tmp_path, torch.float32)
    model = Qwen3Model.from_pretrained(tmp_path)
    ids = torch.randint(config.vocab_size, (100,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0].float()
    torch.testing.assert_close(logits_of(model, ids, (100,)), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(model, ids, (57, 1, 1, 7, 34)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_fp32_as_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    save_folder(tmp_path, CONFIG)
    ids = torch.randint(CONFIG.vocab_size, (100,), generator=torch.Generator().manual_seed(2))
    exact = logits_of(Qwen3Model.from_pretrained(tmp_path), ids, (100,))
    with torch.no_grad():
        theirs = transformers_model(tmp_path, dtype)(ids[None]).logits[0].float()
    model = Qwen3Model.from_pretrained(tmp_path, dtype=dtype)
    assert model.dtype == dtype
    ours = logits_of(model, ids, (50, 1, 49))
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()


def shared_models() -> Iterator[Path]:
    override = os.environ.get("VEGAS_OPS_SHARED")
    roots = [Path(override)] if override else []
    roots += [parent / "shared" for parent in Path(__file__).resolve().parents]
    for root in roots:
        if (root / "models").is_dir():
            yield from sorted((root / "models").iterdir())
            return


@pytest.mark.parametrize("folder", [DEMO_MODEL, *shared_models()], ids=lambda path: path.name)
def test_real_model_matches_transformers(folder: Path) -> None:
    model = Qwen3Model.from_pretrained(folder, dtype=torch.float32)
    text = Path(json.__file__).read_text() + Path(__file__).read_text()
    tokenizer = Tokenizer(folder)
    ids = torch.tensor(tokenizer.encode(text)[:2000])
    assert tokenizer.decode(ids.tolist()) == text[: len(tokenizer.decode(ids.tolist()))]
    logits = logits_of(model, ids, (1500, 7, 1, 492))
    # A trained model reads code: far better than the log of the vocabulary's size, 9.0.
    assert F.cross_entropy(logits[:-1], ids[1:]) < 3.5
    with torch.no_grad():
        expected = transformers_model(folder, torch.float32)(ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)


def test_rows_do_not_depend_on_how_many_there_are() -> None:
    config = replace(CONFIG, intermediate_size=2100, num_layers=2)
    model = Qwen3Model.random(config)
    fixed = Qwen3Model.random(config, batch_invariant=True)
    if not fixed.batch_invariant:
        pytest.skip("this machine's matrix product depends on a row's place among 64")
    ids = torch.randint(config.vocab_size, (24,), generator=torch.Generator().manual_seed(3))
    for candidate in (model, fixed):
        if not candidate.batch_invariant:
            continue
        results = []
        for sizes in ((24,), (1,) * 24, (7, 7, 7, 3), (16, 8)):
            attend, done, rows = RowwiseAttend(config.num_layers), 0, []
            for size in sizes:
                span = slice(done, done + size)
                positions = torch.arange(24)[span]
                rows.append(candidate.compute_logits(candidate.forward(ids[span], positions, attend)))
                done += size
            results.append(torch.cat(rows))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [1, 33, 1024, 2100])
@pytest.mark.parametrize("rows", [0, 1, 7, 130])
def test_linear_matches_matmul(dtype: torch.dtype, in_features: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(40, in_features, generator=generator).mul(in_features**-0.5).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    residual = torch.randn(rows, 40, generator=generator).to(dtype)
    expected = x.double() @ weight.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    for fixed_rows in (False, True):
        plain = Linear(weight, fixed_rows=fixed_rows)
        biased = Linear(weight, bias, fixed_rows=fixed_rows)
        for got, want in (
            (plain(x), expected),
            (biased(x), expected + bias),
            (biased(x, residual.clone()), expected + bias + residual),
            (plain(x, residual.clone()), expected + residual),
        ):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_shards_and_single_file_agree(tmp_path: Path) -> None:
    save_folder(tmp_path / "one", CONFIG)
    save_folder(tmp_path / "three", CONFIG, shards=3)
    ids = torch.arange(20)
    one, three = (
        logits_of(Qwen3Model.from_pretrained(tmp_path / name), ids, (20,)) for name in ("one", "three")
    )
    assert torch.equal(one, three)


def test_mixed_sequences_in_one_forward() -> None:
    model = Qwen3Model.random(CONFIG)
    ids = torch.randint(CONFIG.vocab_size, (30,), generator=torch.Generator().manual_seed(5))
    first, second = DenseAttend(3), DenseAttend(3)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        a = first(layer, q[:12], k[:12], v[:12])
        return torch.cat([a, second(layer, q[12:], k[12:], v[12:])])

    positions = torch.cat([torch.arange(12), torch.arange(18)])
    logits = model.compute_logits(model.forward(ids, positions, attend))
    torch.testing.assert_close(logits[:12], logits_of(model, ids[:12], (12,)))
    torch.testing.assert_close(logits[12:], logits_of(model, ids[12:], (18,)))


def test_no_rows() -> None:
    model = Qwen3Model.random(CONFIG)
    empty = torch.empty(0, dtype=torch.long)
    layers = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layers.append(layer)
        assert q.shape == (0, 6, 16) and k.shape == v.shape == (0, 2, 16)
        return torch.empty_like(q)

    hidden = model.forward(empty, empty, attend)
    assert hidden.shape == (0, CONFIG.hidden_size) and layers == [0, 1, 2]
    assert model.compute_logits(hidden).shape == (0, CONFIG.vocab_size)


def test_yarn_extends_max_position(tmp_path: Path) -> None:
    config = replace(CONFIG, rope_scaling=RopeScaling("yarn", 4.0, original_max_position=128))
    save_folder(tmp_path, config)
    loaded = Qwen3Config.from_folder(tmp_path)
    assert loaded.max_position == 512
    assert rope_table(loaded).shape == (512, CONFIG.head_dim // 2)


def test_generation_config_gives_the_end_of_text(tmp_path: Path) -> None:
    save_folder(tmp_path, CONFIG)
    assert Qwen3Config.from_folder(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Qwen3Config.from_folder(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "`model_type` must be 'qwen3', got 'llama'"),
        ({"hidden_size": -4}, "`hidden_size` must be an integer"),
        ({"hidden_size": 1 << 40}, "`hidden_size` must be an integer"),
        ({"vocab_size": True}, "`vocab_size` must be an integer"),
        ({"num_hidden_layers": None}, "`num_hidden_layers` must be an integer"),
        ({"num_key_value_heads": 4}, "`num_attention_heads` must be a multiple"),
        ({"head_dim": 15}, "`head_dim` must be even"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu'"),
        ({"use_sliding_window": True}, "`use_sliding_window` must be false"),
        ({"layer_types": ["sliding_attention"] * 3}, "`layer_types` must all be"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config` must be absent"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "`rope_type` must be"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "`factor` must be at least 1"),
        ({"rope_scaling": [1]}, "`rope_scaling` must be an object"),
        ({"torch_dtype": "float8"}, "`dtype` must be one of"),
        ({"eos_token_id": "end"}, "`eos_token_id` must be token ids"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` must be positive"),
        ({"hidden_size": 64}, "must have shape"),
        ({"num_hidden_layers": 4}, "must hold the tensor 'model.layers.3"),
        ({"attention_bias": True}, "must hold the tensor 'model.layers.0.self_attn.q_proj.bias'"),
    ],
)
def test_refuses_a_wrong_config(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_folder(tmp_path, CONFIG)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ModelFolderError) as error:
        Qwen3Model.from_pretrained(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_refuses_shards_outside_the_folder(tmp_path: Path) -> None:
    save_folder(tmp_path / "good", CONFIG)
    save_folder(tmp_path / "bad", CONFIG, shards=2)
    index = tmp_path / "bad" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    for shard in (
        "../good/model.safetensors",
        str(tmp_path / "good" / "model.safetensors"),
        "model.bin",
        "",
        3,
        "a\\b.safetensors",
        "c:model.safetensors",
    ):
        changed = dict.fromkeys(values["weight_map"], shard)
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ModelFolderError, match="a shard must be a file of the folder"):
            Qwen3Model.from_pretrained(tmp_path / "bad")


def test_refuses_damaged_folders(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(ModelFolderError, match=match):
            Qwen3Model.from_pretrained(tmp_path / "model")

    refused("`folder` must be a directory")
    folder = tmp_path / "model"
    folder.mkdir()
    refused("must hold model.safetensors")
    save_folder(folder, CONFIG)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("must be a safetensors file")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    refused("must be a safetensors file")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{")
    refused("must be JSON")
    (folder / "config.json").write_text("[]")
    refused("must be a JSON object")
    (folder / "config.json").unlink()
    refused("config.json: no such file")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused("`weight_map` must be an object")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    refused("x.safetensors: no such file")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"absent": "model.safetensors"}}')
    refused("must hold 'absent'")


def test_refuses_integer_weights_and_dtypes(tmp_path: Path) -> None:
    tensors = save_folder(tmp_path, CONFIG)
    tensors["model.norm.weight"] = torch.ones(CONFIG.hidden_size, dtype=torch.int32)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match="weight' must be floating point"):
        Qwen3Model.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`dtype` must be torch.float32, .* got torch\.float64"):
        Qwen3Model.from_pretrained(tmp_path, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`dtype` must be torch.float32, .* got 'float32'"):
        Qwen3Model.from_pretrained(tmp_path, "float32")
    with pytest.raises(ValueError, match=r"`device` must be present, got 'cuda:99' \(\d+ GPUs, torch is a"):
        Qwen3Model.from_pretrained(DEMO_MODEL, device="cuda:99")


def test_stream_gives_whole_characters() -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    text = "".join(f"π = {i}, naïve café — 漢字 🙂 x_{i}\n" for i in range(40))
    ids = tokenizer.encode(text)
    push = tokenizer.stream()
    pieces = [push([token]) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.vocab_size == 8192


def test_tokenizer_refuses_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="must be a tokenizer"):
        Tokenizer(tmp_path)
