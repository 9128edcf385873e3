"""What one verification leaves for the drafts that follow it, in buffers of fixed addresses.

Free of vLLM: the engine's adapter says which rows belong to which request, and hands over q and the
cache of every layer. A verification, its selection and the drafts behind it see the same batch in
the same order, so nothing has to be kept per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vegas_ops import ops
from vegas_ops.arguments import check_integer, check_number
from vegas_ops.ops import Dump, OpName

PolicyName = Literal["vegas", "vegas-lookahead"]
SelectionSync = Literal["local", "allreduce"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
SYNCS: tuple[SelectionSync, ...] = get_args(SelectionSync)

# Dumps of as many layers as fit wait for one selection.
SCORE_BYTES = 512 << 20


@dataclass(frozen=True)
class Options:
    """What users may set.

    policy: "vegas" ranks tokens by the sum of logits over heads (the paper's Eq. 2),
    "vegas-lookahead" by softmax weights of each group's mean query, pooled over the tokens that the
    drafts will reach. ratio, min_tokens: of n cached tokens, drafts attend to max(ratio * n,
    min_tokens), and to all newer ones. selection_sync: under tensor parallelism each rank selects by
    its own heads ("local"), or all by the sum over all heads ("allreduce").
    """

    policy: PolicyName = "vegas"
    ratio: float = 0.07
    min_tokens: int = 256
    selection_sync: SelectionSync = "local"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"`policy` must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.selection_sync not in SYNCS:
            raise ValueError(
                f"`selection_sync` must be one of {', '.join(SYNCS)}, got {self.selection_sync!r}"
            )
        check_number("ratio", self.ratio)
        check_integer("min_tokens", self.min_tokens, 0)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"`ratio` must be in [0, 1], got {self.ratio}")

    def budget(self, keys: int) -> int:
        """Tokens listed of `keys` cached ones."""
        # 0.07 * 100 is 7.000000000000001 in floating point: not 8 tokens.
        return min(max(math.ceil(self.ratio * keys - 1e-9), self.min_tokens), keys)


@dataclass(frozen=True)
class Shape:
    """Of a model, and of the batches that it may meet; heads of this rank."""

    layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    softmax_scale: float
    gamma: int
    max_batch: int
    max_seqlen_k: int


@dataclass
class Verification:
    """One forward of the target: rows of `batch` requests, packed.

    The first `decodes` requests have at most gamma + 1 rows each, [0, rows). The others are chunks of
    prompts, of which the last row alone is seen, the row `last_rows` says. max_rows bounds the rows of
    the first ones, max_keys all lengths.
    """

    batch: int
    decodes: int
    rows: int
    max_rows: int
    max_keys: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    page_size: int
    last_rows: Tensor | None = None


class Guidance:
    """Buffers of one model's verifications and drafts; all memory is allocated here.

    all_reduce: sums a tensor over the ranks, for `selection_sync="allreduce"`.
    """

    def __init__(
        self,
        shape: Shape,
        options: Options,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.shape, self.options, self.device = shape, options, torch.device(device)
        self.all_reduce = all_reduce if options.selection_sync == "allreduce" else None
        self.max_k = options.budget(shape.max_seqlen_k)
        self.pool = (shape.gamma, 0) if options.policy == "vegas-lookahead" else (0, 0)
        self.dump: Dump = "kv_head" if options.policy == "vegas-lookahead" else "token"
        batch, width, kv = shape.max_batch, shape.max_seqlen_k, shape.num_heads_kv
        room = (batch, width) if self.dump == "token" else (batch, 2, kv, width)
        score_dtype = torch.float32 if self.dump == "token" or dtype == torch.float32 else torch.bfloat16
        layer_bytes = math.prod(room) * score_dtype.itemsize
        self.chunk = min(shape.layers, max(1, SCORE_BYTES // layer_bytes))  # layers per selection
        like: dict[str, Any] = {"device": self.device, "dtype": torch.int32}
        self.candidates = torch.zeros(batch, **like)
        self.k = torch.zeros(batch, **like)
        self.dump_rows = torch.zeros(batch, **like)
        self._row_starts = torch.arange(batch + 1, **like)
        # Of all layers, at fixed addresses; and packed, as a selection over some layers writes them.
        self.indices = torch.zeros((shape.layers, batch, self.max_k), **like)
        self.lengths = torch.zeros((shape.layers, batch), **like)
        self._indices = torch.zeros(self.chunk * batch * self.max_k, **like)
        self._lengths = torch.zeros(self.chunk * batch, **like)
        self._scores = torch.zeros((self.chunk, *room), dtype=score_dtype, device=self.device)
        self._guide_lse = torch.zeros((self.chunk, batch, 2, kv), device=self.device)
        self._workspaces = {
            "flash_attn_with_logit_dump": self._workspace("flash_attn_with_logit_dump", 1),
            "topk_aggregate_logits": self._workspace("topk_aggregate_logits", self.chunk),
            "sparse_paged_decode": self._workspace("sparse_paged_decode", 1),
        }
        self.verification: Verification | None = None  # the latest

    def _workspace(self, op: OpName, layers: int) -> Tensor | None:
        if self.device.type != "cuda":
            return None
        s = self.shape
        select = op == "topk_aggregate_logits"
        heads = s.num_heads_kv if self.dump == "kv_head" else 1
        return ops.make_workspace(
            op, max_batch=s.max_batch, max_q_len=s.gamma + 1, max_seqlen_k=s.max_seqlen_k,
            max_k=self.max_k, layers=layers, device=self.device,
            num_heads_q=heads if select else s.num_heads_q,
            num_heads_kv=heads if select else s.num_heads_kv,
            head_dim=1 if select else s.head_dim,
        )  # fmt: skip

    # A verification

    def begin(self, v: Verification) -> None:
        """What is dumped of each request, and its budget, from lengths on the device. To be called
        before every forward of the target, outside a captured graph."""
        n, s = v.batch, self.shape
        if n > s.max_batch:
            raise ValueError(f"`batch` must be at most {s.max_batch}, got {n}")
        self.verification = v
        keys = v.seq_lens[:n]
        q_lens = v.query_start_loc[1 : n + 1] - v.query_start_loc[:n]
        # Rows of a prompt beyond a verification's: the last one ranks them all.
        prompt = q_lens > s.gamma + 1
        newer = (q_lens - 1).masked_fill(prompt, 0)
        candidates = torch.minimum(keys - newer, keys).clamp(min=0)
        k = torch.ceil(keys.double() * self.options.ratio - 1e-9).clamp(min=self.options.min_tokens)
        self.candidates[:n] = candidates
        self.k[:n] = torch.minimum(k.int(), candidates)
        self.dump_rows[:n] = torch.where(prompt, 2, 3)
        self.dump_rows[v.decodes : n] = 2

    def verify(
        self, layer: int, v: Verification, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor
    ) -> None:
        """Full attention of the first `decodes` requests' rows, q and out (rows, num_heads_q, head_dim),
        and a dump of all requests; at the last layer of a chunk, their selection."""
        n = v.decodes
        if n:
            self._attend(
                layer, v, slice(0, n), q[: v.rows], k_cache, v_cache, out[: v.rows],
                cu_seqlens_q=v.query_start_loc[: n + 1], max_seqlen_q=v.max_rows,
            )  # fmt: skip
        prompts = v.batch - n
        if prompts:
            assert v.last_rows is not None
            last = q[v.last_rows]
            self._attend(
                layer, v, slice(n, v.batch), last, k_cache, v_cache, torch.empty_like(last),
                cu_seqlens_q=self._row_starts[: prompts + 1], max_seqlen_q=1,
            )  # fmt: skip
        if (layer + 1) % self.chunk == 0 or layer + 1 == self.shape.layers:
            self._select(layer - layer % self.chunk, layer + 1, v)

    def _attend(
        self, layer: int, v: Verification, requests: slice, q: Tensor, k_cache: Tensor, v_cache: Tensor,
        out: Tensor, **rows: Any,
    ) -> None:  # fmt: skip
        place = layer % self.chunk
        ops.flash_attn_with_logit_dump(
            q, k_cache, v_cache, v.block_table[requests], v.seq_lens[requests],
            max_seqlen_k=v.max_keys, softmax_scale=self.shape.softmax_scale,
            dump=self.dump, dump_len=self.candidates[requests], dump_rows=self.dump_rows[requests], out=out,
            logits=self._scores[place, requests],
            guide_lse=self._guide_lse[place, requests] if self.dump == "kv_head" else None,
            workspace=self._workspaces["flash_attn_with_logit_dump"], **rows,
        )  # fmt: skip

    def _select(self, begin: int, end: int, v: Verification) -> None:
        n, layers = v.batch, end - begin
        candidates, scores = self.candidates[:n], self._scores[:layers, :n]
        dump: Dump = self.dump
        how: dict[str, Any] = {}
        if dump == "kv_head":
            how = {
                "mode": "weight",
                "guide_lse": self._guide_lse[:layers, :n].contiguous(),
                "dump_rows": self.dump_rows[:n],
            }
        if self.all_reduce is not None:
            if dump == "kv_head":
                scores, _ = ops.aggregate_logits(scores, dump=dump, seqlens=candidates, **how)
            scores = self.all_reduce(scores[..., : v.max_keys].contiguous())
            dump, how = "token", {}
        indices, lengths = ops.topk_aggregate_logits(
            scores, dump=dump, seqlens=candidates, k=self.k[:n], max_k=self.max_k, pool=self.pool,
            indices=self._indices[: layers * n * self.max_k].view(layers, n, self.max_k),
            topk_length=self._lengths[: layers * n].view(layers, n),
            workspace=self._workspaces["topk_aggregate_logits"], **how,
        )  # fmt: skip
        self.indices[begin:end, :n] = indices
        self.lengths[begin:end, :n] = lengths

    # Drafts

    def draft(
        self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor,
        block_table: Tensor, seq_lens: Tensor, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One row per request, over its list and everything newer; seq_lens: keys, its own included.

        rows: (n,) int64, which requests of the verification these are; default: the first n.
        """
        n = q.shape[0]
        indices, length, tail_start = self.indices[layer], self.lengths[layer], self.candidates
        if rows is not None:
            indices, length, tail_start = indices[rows], length[rows], tail_start[rows]
        ops.sparse_paged_decode(
            q, k_cache, v_cache, indices[:n], length[:n], tail_start=tail_start[:n], seqused_k=seq_lens[:n],
            block_table=block_table[:n], indices_are_slots=False,
            softmax_scale=self.shape.softmax_scale, out=out,
            workspace=self._workspaces["sparse_paged_decode"],
        )  # fmt: skip
