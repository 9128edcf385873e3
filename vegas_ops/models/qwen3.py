"""Qwen3 dense decoder over caller-supplied attention, for inference.

Rows are flat: any mix of sequences, each row with its own position, no batch dimension. What
attends to what is the business of `attend`, one call per layer (see `Attend`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from vegas_ops.arguments import check_dtype, check_integer, check_kind
from vegas_ops.devices import present
from vegas_ops.models import fused
from vegas_ops.models.config import ModelFolderError, Qwen3Config
from vegas_ops.models.linear import Linear
from vegas_ops.models.rope import pair_order, rope_table
from vegas_ops.models.weights import SafetensorsFolder


class Attend(Protocol):
    """Appends the rows' keys and values to a cache and attends.

    q: (rows, num_heads_q, head_dim). k, v: (rows, num_heads_kv, head_dim). All are strided views
    whose last dimension is contiguous. Returns (rows, num_heads_q, head_dim).
    """

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor  # (hidden,)
    qkv: Linear
    qk_norm: torch.Tensor  # (num_heads_q + num_heads_kv, head_dim) fp32: one weight a head, as multiplied
    attention_out: Linear
    mlp_norm: torch.Tensor  # (hidden,)
    gate_up: Linear
    down: Linear


class Qwen3Model:
    """Qwen3 dense decoder: QK-norm, grouped queries, RoPE, SwiGLU, tied or untied embeddings.

    Attributes: `num_layers`, `num_heads_q`, `num_heads_kv`, `head_dim`, `vocab_size`,
    `max_position` (tokens), `dtype`, `device`, `softmax_scale`, `config`, and `batch_invariant`:
    whether every linear layer was found to compute a row alike among any number of rows.

    Queries and keys leave in the order of `rope.pair_order`, not in the checkpoint's; attention
    does not notice.
    """

    def __init__(
        self,
        config: Qwen3Config,
        tensors: dict[str, torch.Tensor],
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
    ) -> None:
        """`tensors`: the checkpoint's, by their Hugging Face names, in one dtype.

        `batch_invariant=True` pays for row-count independence where it is not free (a GPU, fp16):
        linear layers then always compute 64 rows.
        """
        check_kind("config", config, Qwen3Config, "a Qwen3Config")
        check_kind("tensors", tensors, Mapping, "a dict of tensors")
        missing = [name for name, _ in parameter_shapes(config) if name not in tensors]
        if missing:
            raise ValueError(f"`tensors` must hold {missing[0]}, one of {len(missing)} that it lacks")
        self.config = config
        self.device = present(device)
        self.num_layers = config.num_layers
        self.num_heads_q = config.num_heads_q
        self.num_heads_kv = config.num_heads_kv
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self.softmax_scale = config.head_dim**-0.5
        self._embedding = tensors["model.embed_tokens.weight"].to(self.device)
        self.dtype = self._embedding.dtype
        self._fixed_rows = batch_invariant
        self._layers = [self._make_layer(tensors, i) for i in range(config.num_layers)]
        self._norm = tensors["model.norm.weight"].to(self.device)
        head = self._embedding
        if not config.tie_word_embeddings:
            head = tensors["lm_head.weight"].to(self.device)
        self._head = Linear(head, fixed_rows=batch_invariant)
        self._rope = rope_table(config, self.device)
        first = self._layers[0]
        kinds = (first.qkv, first.attention_out, first.gate_up, first.down, self._head)
        with torch.no_grad():
            self.batch_invariant = all(linear.is_row_invariant() for linear in kinds)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
    ) -> Qwen3Model:
        """Loads a Hugging Face folder with safetensors weights, one file or shards.

        dtype: fp32, bf16 or fp16; None takes the config's. Raises ModelFolderError, which names the
        file and the field, for a folder that is not a complete Qwen3 model.
        """
        files = SafetensorsFolder(folder)
        config = Qwen3Config.from_folder(folder)
        dtype = config.dtype if dtype is None else dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            kinds = "torch.float32, torch.bfloat16 or torch.float16"
            raise ValueError(f"`dtype` must be {kinds}, got {dtype!r}")
        device = present(device)
        tensors = files.read(parameter_shapes(config), dtype)
        return cls(config, tensors, device, batch_invariant)

    @classmethod
    def random(
        cls,
        config: Qwen3Config,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
    ) -> Qwen3Model:
        """A model with random weights that keep activations near unit variance, for tests."""
        check_kind("config", config, Qwen3Config, "a Qwen3Config")
        check_integer("seed", seed)
        check_dtype("dtype", dtype)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in parameter_shapes(config):
            value = torch.randn(shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.1 * value
            elif len(shape) == 2:
                value = value * shape[1] ** -0.5
            else:
                value = 0.1 * value
            tensors[name] = value.to(dtype)
        return cls(config, tensors, device, batch_invariant)

    def _make_layer(self, tensors: dict[str, torch.Tensor], index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        order = pair_order(config.head_dim)

        def weight(name: str) -> torch.Tensor:
            return tensors[prefix + name + ".weight"]

        def bias(name: str) -> torch.Tensor | None:
            return tensors[prefix + name + ".bias"] if config.attention_bias else None

        def paired(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)

        def join(parts: list[torch.Tensor], biases: list[torch.Tensor | None]) -> Linear:
            known = [part for part in biases if part is not None]
            return Linear(
                torch.cat(parts).to(self.device),
                torch.cat(known).to(self.device) if known else None,
                self._fixed_rows,
            )

        q_bias, k_bias, v_bias = (bias(f"self_attn.{x}_proj") for x in "qkv")
        return _Layer(
            input_norm=weight("input_layernorm").to(self.device),
            qkv=join(
                [
                    paired(weight("self_attn.q_proj")),
                    paired(weight("self_attn.k_proj")),
                    weight("self_attn.v_proj"),
                ],
                [
                    None if q_bias is None else paired(q_bias),
                    None if k_bias is None else paired(k_bias),
                    v_bias,
                ],
            ),
            qk_norm=torch.cat(
                [
                    weight("self_attn.q_norm")[order].expand(config.num_heads_q, -1),
                    weight("self_attn.k_norm")[order].expand(config.num_heads_kv, -1),
                ]
            ).to(self.device, torch.float32),
            attention_out=join([weight("self_attn.o_proj")], [bias("self_attn.o_proj")]),
            mlp_norm=weight("post_attention_layernorm").to(self.device),
            gate_up=join([weight("mlp.gate_proj"), weight("mlp.up_proj")], []),
            down=join([weight("mlp.down_proj")], []),
        )

    @torch.no_grad()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states after the final norm, (rows, hidden), in the model's dtype.

        token_ids, positions: (rows,) integers on the model's device; positions below
        `max_position`. Calls `attend` once per layer, in order. No rows: an empty result, `attend`
        is still called.
        """
        config, eps, rows = self.config, self.config.rms_norm_eps, token_ids.shape[0]
        q_heads, head_dim = config.num_heads_q, config.head_dim
        qk_heads = q_heads + config.num_heads_kv
        heads_shape = (rows, qk_heads + config.num_heads_kv, head_dim)
        x = fused.embed(token_ids, self._embedding)
        # Where one kernel does all between the matrix product and attention, the write to the cache too.
        whole = fused.available(x) and fused.rotates(head_dim)
        target = getattr(attend, "target", None) if whole else None
        rope = None if whole else self._rope[positions].unsqueeze(1)
        # Few views: on small models the cost of a decoding step is calls.
        scaled: fused.Scaled | None = None
        following = [layer.input_norm for layer in self._layers[1:]] + [None]
        for index, layer in enumerate(self._layers):
            place = None if target is None else target(index)
            k: torch.Tensor | None = None
            v: torch.Tensor | None = None
            q = layer.qkv.rotated(x, layer.input_norm, eps, layer.qk_norm, self._rope, positions, place)
            if q is None:
                qkv = layer.qkv.of_norm(x, layer.input_norm, eps, scaled=scaled).view(heads_shape)
            if q is None and rope is None:
                fused.rotate(qkv, layer.qk_norm, self._rope, positions, eps, place)
                q, k, v = qkv.tensor_split((q_heads, qk_heads), 1)
                if place is not None:
                    k = v = None
            elif q is None:
                assert rope is not None
                qk, v = qkv.tensor_split((qk_heads,), 1)
                qk = torch.rms_norm(qk, (head_dim,), None, eps) * layer.qk_norm
                pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rope
                q, k = torch.view_as_real(pairs).flatten(-2).to(x.dtype).tensor_split((q_heads,), 1)
            x, scaled = layer.attention_out.then_norm(attend(index, q, k, v).flatten(1), x, layer.mlp_norm)
            inner = layer.gate_up.of_norm(x, layer.mlp_norm, eps, gated=True, scaled=scaled)
            x, scaled = layer.down.then_norm(inner, x, following[index])
        return fused.rms_norm(x, self._norm, eps)

    @torch.no_grad()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) from `forward` -> (rows, vocab_size) fp32."""
        return self._head.logits(hidden)


def parameter_shapes(config: Qwen3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors, as Hugging Face names them."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads_q * dim, config.num_heads_kv * dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name, out_size, in_size in (
            ("q_proj", q_size, hidden),
            ("k_proj", kv_size, hidden),
            ("v_proj", kv_size, hidden),
            ("o_proj", hidden, q_size),
        ):
            yield f"{prefix}self_attn.{name}.weight", (out_size, in_size)
            if config.attention_bias:
                yield f"{prefix}self_attn.{name}.bias", (out_size,)
        yield f"{prefix}self_attn.q_norm.weight", (dim,)
        yield f"{prefix}self_attn.k_norm.weight", (dim,)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


__all__ = ["Attend", "ModelFolderError", "Qwen3Config", "Qwen3Model", "parameter_shapes"]
