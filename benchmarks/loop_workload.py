"""What `loop.py` decodes: texts, exported prompts, or random weights with replayed acceptance."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import Bench
from torch import Tensor

from vegas_ops.models import Qwen3Config, Qwen3Model, Tokenizer
from vegas_ops.models.qwen3 import parameter_shapes
from vegas_ops.session import PAGE_SIZE
from vegas_ops.speculative import PagedKVCache, Request, SpeculativeDecoder
from vegas_ops.speculative.attention import VerifyContext
from vegas_ops.speculative.model import LayerAttention

PAPER_GAMMA = 6
# Tokens per iteration at PAPER_GAMMA, Qwen3-8B: the paper's figures for its policies, by what they stand for.
PAPER_TOKENS = {"vegas": 6.24, "streaming": 4.92, "quest": 5.43, "specextend": 5.24}
_TEXT_FIELDS = ("prompt", "text", "context", "question", "problem", "input", "description")
_RING = 1009  # tokens that replayed text consists of: a prime


def cut_prompts(ids: Sequence[int], batch: int, context: int) -> list[list[int]]:
    """The `context` tokens before each of `batch` places, evenly spread; a short text is repeated."""
    ends = [len(ids) * (i + 1) // batch for i in range(batch)]
    repeated = list(ids) * (1 + -(-context // len(ids)))
    return [repeated[: len(repeated) - len(ids) + end][-context:] for end in ends]


def record_text(record: Any) -> str:
    """The prompt of one JSON line: a string; chat `messages`; or the fields that name a prompt, joined
    (`context` and `question` of LongBench-v2, `problem` of AIME, `description` of CodeElo)."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise ValueError("must be a JSON object or a string")
    if isinstance(record.get("messages"), list):
        parts = [message.get("content") for message in record["messages"] if isinstance(message, dict)]
    else:
        parts = [record[name] for name in _TEXT_FIELDS if name in record]
        parts += [record[name] for name in sorted(record) if name.startswith("choice_")]
    text = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    if not text:
        raise ValueError(f"must hold `messages` or one of {', '.join(_TEXT_FIELDS)}")
    return text


def jsonl_prompts(path: Path, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """The prompts of a file of JSON lines, each its last `context` tokens at most."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            ids = tokenizer.encode(record_text(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if ids:
            prompts.append(ids[-context:])
    if not prompts:
        raise ValueError(f"`prompts` must hold at least one, got none in {path}")
    return prompts


def read_ceiling(device: torch.device) -> tuple[float, str]:
    """GB/s of a plain read of 8 GB (0.25 on a CPU), and how it was read."""
    options = argparse.Namespace(
        device=device.type,
        quick=False,
        seconds=60.0,
        cpu_time=False,
        pool_gb=8.0 if device.type == "cuda" else 0.1,
    )
    bench = Bench(options)
    return bench.ceiling_gbs, bench.ceiling_method


# Random weights


@dataclass(frozen=True)
class Shape:
    """window: of every other layer, from the first on; sinks: an attention sink per head; experts: the MLP
    is a mixture of experts and left out, so that a layer is attention with its projections alone."""

    config: Qwen3Config
    window: int | None = None
    sinks: bool = False
    experts: bool = False


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, tied: bool, kv: int = 8, dim: int = 128,
    vocabulary: int = 151_936,
) -> Qwen3Config:  # fmt: skip
    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads_q=heads, num_heads_kv=kv, head_dim=dim, max_position=40_960, tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )  # fmt: skip


SHAPES = {
    "qwen3-0.6b": Shape(_qwen3(1024, 3072, 28, 16, True)),
    "qwen3-4b": Shape(_qwen3(2560, 9728, 36, 32, True)),
    "qwen3-8b": Shape(_qwen3(4096, 12288, 36, 32, False)),
    "qwen3-30b-a3b": Shape(_qwen3(2048, 128, 48, 32, False, 4), experts=True),
    "gpt-oss-20b": Shape(_qwen3(2880, 128, 24, 64, False, 8, 64, 201_088), 128, True, True),
}


class _NoMLP:
    """In the place of both of a layer's MLP matrices: the residual stays as it is."""

    def of_norm(self, x: Tensor, norm: Tensor, eps: float, gated: bool = False, scaled: Any = None) -> Tensor:
        return x

    def then_norm(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, None]:
        return residual, None


class ReplayedModel(Qwen3Model):
    """A model whose every matrix product and attention runs, and whose logits are then replaced.

    After a token follows one certain other; a draft is wrong with probability `1 - rate`, decided by
    the token before it and its position. So drafts are accepted one by one with probability `rate`.
    """

    threshold: Tensor  # of 65,536: drafts that are right
    shape: Shape
    layer_attention: list[LayerAttention]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        self._fed, self._positions = token_ids, positions
        self._drafting = not isinstance(attend, VerifyContext)
        return super().forward(token_ids, positions, attend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        token = (self._fed * 31 + 7) % _RING
        if self._drafting:
            mixed = (self._fed * 40_503 + self._positions * 48_271) * 69_621 % 2_147_483_647
            token = token + (mixed % 65_536 >= self.threshold)
        return logits.scatter_(1, token[:, None], 1e4)

    def replay(self, tokens: float, gamma: int) -> None:
        """Sets the rate at which `gamma` drafts give so many tokens an iteration."""
        low, high = 0.0, 1.0
        for _ in range(40):
            rate = (low + high) / 2
            low, high = (rate, high) if sum(rate**i for i in range(gamma + 1)) < tokens else (low, rate)
        self.threshold.fill_(round(low * 65_536))


def random_model(name: str, context: int, device: torch.device) -> ReplayedModel:
    """Random weights of a known shape, with room for `context` tokens; the norms' weights are 1."""
    shape = SHAPES[name]
    known = shape.config
    config = Qwen3Config(**{**known.__dict__, "max_position": max(context, known.max_position)})
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for key, size in parameter_shapes(config):
        x = torch.ones(size, dtype=config.dtype, device=device)
        tensors[key] = x if len(size) == 1 else x.normal_(std=size[1] ** -0.5, generator=generator)
    model = ReplayedModel(config, tensors, device)
    model.threshold = torch.zeros((), dtype=torch.int64, device=device)
    model.shape = shape
    if shape.experts:
        nothing: Any = _NoMLP()
        model._layers = [replace(layer, gate_up=nothing, down=nothing) for layer in model._layers]
    sinks = torch.zeros(config.num_heads_q, device=device) if shape.sinks else None
    model.layer_attention = [
        LayerAttention(shape.window if i % 2 == 0 else None, sinks=sinks) for i in range(config.num_layers)
    ]
    return model


def hold_random(decoder: SpeculativeDecoder, length: int, seed: int) -> Request:
    """A prompt whose K and V are random numbers: what reading it would leave, without reading it."""
    cache: PagedKVCache = decoder.cache
    generator = torch.Generator(cache.device).manual_seed(seed)
    prompt = torch.randint(0, _RING, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    request = Request(prompt, max_new_tokens=1, gamma=0)
    request.sequence = cache.new_sequence()
    cache.reserve(request.sequence, length)
    request.sequence.length = length - 1
    pages = torch.tensor(request.sequence.pages, device=cache.device)
    page = (len(pages), *cache.k.shape[2:])
    for layer in range(cache.k.shape[0]):
        for x in (cache.k, cache.v):
            x[layer].index_copy_(
                0, pages, torch.randn(page, dtype=x.dtype, device=x.device, generator=generator)
            )
    return request


class RandomSession:
    """What `Session` is to a model folder, for random weights."""

    batch_invariant = False
    tokenizer: Any = None

    def __init__(self, name: str, context: int, device: torch.device) -> None:
        self.model = random_model(name, context, device)

    def decoder(self, max_tokens: int, read_every: int = 1) -> SpeculativeDecoder:
        model = self.model
        cache = PagedKVCache(
            num_layers=model.num_layers, num_pages=-(-max_tokens // PAGE_SIZE), page_size=PAGE_SIZE,
            num_heads_kv=model.num_heads_kv, head_dim=model.head_dim, dtype=model.dtype, device=model.device,
        )  # fmt: skip
        return SpeculativeDecoder(model, cache, read_every=read_every)


def weight_bytes(model: Qwen3Model) -> int:
    """Bytes of the matrices that every forward reads."""
    c = model.config
    heads = (c.num_heads_q + 2 * c.num_heads_kv) * c.head_dim
    inner = 0 if isinstance(model, ReplayedModel) and model.shape.experts else c.intermediate_size
    layer = c.hidden_size * (heads + c.num_heads_q * c.head_dim + 3 * inner)
    element = torch.empty((), dtype=model.dtype).element_size()
    return (c.num_layers * layer + c.vocab_size * c.hidden_size) * element
