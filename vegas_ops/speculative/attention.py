"""The attention of the three phases: what `attend` does for a prompt, a verification, a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from vegas_ops import ops
from vegas_ops.speculative.kv_cache import CacheSequence, PagedKVCache
from vegas_ops.speculative.model import Model, layer_attention, selecting_layers
from vegas_ops.speculative.policies import Selection, Verified, budget
from vegas_ops.speculative.request import Request


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list as a tensor, without waiting for the device."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def sequence_of(request: Request) -> CacheSequence:
    if request.sequence is None:
        raise RuntimeError("a request without pages cannot run")
    return request.sequence


class Rows:
    """The new rows of a forward: q_lens[i] tokens of requests[i] from position starts[i] on.

    The cache must have room for them. Per row, (n,) int64: owner (which request), offset (which of
    its rows), positions, slots. Per request, int32: seqused_k, cu_seqlens_q, block_table. keys and
    ends: seqused_k and cu_seqlens_q on the host.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        requests: Sequence[Request],
        starts: Sequence[int],
        q_lens: Sequence[int],
    ) -> None:
        self.cache, self.q_lens = cache, list(q_lens)
        self.keys = [start + n for start, n in zip(starts, q_lens, strict=True)]
        self.ends = [0]
        for n in q_lens:
            self.ends.append(self.ends[-1] + n)
        rows = [(i, j, starts[i] + j) for i, n in enumerate(q_lens) for j in range(n)]
        self.owner, self.offset, self.positions = to_device(
            list(zip(*rows, strict=True)), torch.int64, cache.device
        )
        self.seqused_k = to_device(self.keys, torch.int32, cache.device)
        self.cu_seqlens_q = to_device(self.ends, torch.int32, cache.device)
        self.block_table = cache.block_table([sequence_of(request) for request in requests])
        self.slots = cache.slots(self.block_table, self.owner, self.positions)


def _workspace(
    model: Model,
    cache: PagedKVCache,
    op: ops.OpName,
    q_lens: Sequence[int],
    keys: Sequence[int],
    max_k: int = 0,
) -> Tensor | None:
    return cache.workspaces.get(
        op,
        max_batch=len(q_lens),
        max_q_len=max(q_lens),
        max_seqlen_k=max(keys),
        max_k=max_k,
        layers=1,
        num_heads_q=model.num_heads_q,
        num_heads_kv=model.num_heads_kv,
        head_dim=model.head_dim,
    )


class PrefillContext:
    """A chunk of one prompt; nothing is dumped.

    On a GPU torch's own attention serves many rows of a plain layer best, over gathered pages. On
    the CPU the verification's kernel does (fp32, 512 rows over 16K keys, one core: 1.7 times as fast
    as the best formulation in torch, bf16: level), and a text that is computed anew gets the same bits.
    """

    def __init__(self, model: Model, cache: PagedKVCache, request: Request, n: int) -> None:
        self.model, self.cache, self.sequence = model, cache, sequence_of(request)
        self.rows = Rows(cache, [request], [self.sequence.length], [n])
        self.layers = layer_attention(model)
        self.by_torch = cache.device.type != "cpu"
        self._bias: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.append(layer, self.rows.slots, k, v)
        if self.by_torch and self.layers[layer].plain:
            return self._torch_attention(layer, q)
        return ops.flash_attn_with_logit_dump(
            q,
            self.cache.k[layer],
            self.cache.v[layer],
            self.rows.block_table,
            self.rows.seqused_k,
            cu_seqlens_q=self.rows.cu_seqlens_q,
            max_seqlen_q=self.rows.q_lens[0],
            max_seqlen_k=self.rows.keys[0],
            softmax_scale=self.model.softmax_scale,
            k_descale=self.cache.k_descale,
            v_descale=self.cache.v_descale,
            dump="none",
            **self.layers[layer].options,
        )[0]

    def _torch_attention(self, layer: int, q: Tensor) -> Tensor:
        n, keys = self.rows.q_lens[0], self.rows.keys[0]
        if self._bias is None:
            hidden = torch.ones(n, keys, dtype=torch.bool, device=q.device).triu_(keys - n + 1)
            # As numbers: a bool mask would be converted anew in every layer.
            self._bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        k, v = self.cache.gather(layer, self.sequence, keys, q.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        # A call for each head of a group: no copy of K and V per query head.
        heads = [
            scaled_dot_product_attention(
                q[:, i::group], k, v, attn_mask=self._bias, scale=self.model.softmax_scale
            )
            for i in range(group)
        ]
        return torch.stack(heads, 2).flatten(1, 2)[0].transpose(0, 1)


class VerifyGroup:
    """Neighbours in a verification that share a policy: one op call per layer and one selection.

    selects: False for requests that need no selection, or not from this verification.
    """

    def __init__(
        self,
        model: Model,
        rows: Rows,
        begin: int,
        requests: Sequence[Request],
        selects: bool,
        seeds: Tensor,
        rounds: Tensor,
    ) -> None:
        self.model, self.rows, self.requests = model, rows, requests
        self.layers, selecting = layer_attention(model), selecting_layers(model)
        self.place = {layer: i for i, layer in enumerate(selecting)}  # in what is dumped
        self.selects = selects = selects and bool(selecting)
        policy, batch, device = requests[0].policy, len(requests), rows.cache.device
        hints = [q.selection.guide_lse for q in requests if q.selection is not None]
        known = [hint for hint in hints if hint is not None]
        hint = torch.stack(known, 1) if selects and len(known) == batch else None
        dump = policy.dump(hint is not None) if selects else "none"
        self.batch = slice(begin, begin + batch)
        self.span = slice(rows.ends[begin], rows.ends[begin + batch])
        q_lens, keys = rows.q_lens[self.batch], rows.keys[self.batch]
        num_candidates = [n - q_len + 1 for n, q_len in zip(keys, q_lens, strict=True)]
        self.seqused_k = rows.seqused_k[self.batch]
        total_q, width = self.span.stop - self.span.start, max(keys)
        layers, heads_q, heads_kv = len(selecting), model.num_heads_q, model.num_heads_kv
        shape = {
            "token": (layers, batch, width),
            "token_weight": (layers, batch, width),
            "kv_head": (layers, batch, 2, heads_kv, width),
            "rows": (layers, batch, heads_q, 2, width),
            "all": (layers, total_q, heads_q, width),
        }.get(dump)
        wide = dump in ("token", "token_weight") or model.dtype == torch.float32
        dtype = torch.float32 if wide else torch.bfloat16
        guide = dump in ("token_weight", "kv_head")
        last_only = policy.last_row_only and dump not in ("none", "all")
        candidates = to_device(num_candidates, torch.int32, device)
        # Scores that the policy normalises itself need every key, not the candidates alone.
        self.dump_len = self.seqused_k if dump == "all" else candidates
        self.verified = Verified(
            dump=dump,
            logits=None if shape is None else torch.empty(shape, dtype=dtype, device=device),
            lse=torch.empty((layers, heads_q, total_q), device=device),
            guide_lse=torch.empty((layers, batch, 2, heads_kv), device=device) if guide else None,
            hint=hint,
            cu_seqlens_q=rows.cu_seqlens_q[begin : begin + batch + 1] - self.span.start,
            rows=q_lens,
            candidates=candidates,
            num_candidates=num_candidates,
            seqused_k=keys,
            dump_rows=torch.full_like(self.seqused_k, 2) if last_only else None,
            seeds=seeds,
            rounds=rounds,
            num_heads_kv=heads_kv,
            sinks=_stacked_sinks(model, selecting),
            workspaces=rows.cache.workspaces,
        )

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        cache, v = self.rows.cache, self.verified
        i = self.place.get(layer)
        ops.flash_attn_with_logit_dump(
            q[self.span],
            cache.k[layer],
            cache.v[layer],
            self.rows.block_table[self.batch],
            self.seqused_k,
            cu_seqlens_q=v.cu_seqlens_q,
            max_seqlen_q=max(v.rows),
            max_seqlen_k=max(v.seqused_k),
            softmax_scale=self.model.softmax_scale,
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            out=out[self.span],
            lse=None if i is None else v.lse[i],
            workspace=_workspace(self.model, cache, "flash_attn_with_logit_dump", v.rows, v.seqused_k),
            **self.layers[layer].options,
            **self._dump(i),
        )

    def _dump(self, i: int | None) -> dict[str, Any]:
        """Arguments of the dump into the i-th place."""
        v = self.verified
        if i is None or v.logits is None:
            return {"dump": "none"}
        return {
            "dump": v.dump,
            "dump_rows": v.dump_rows,
            "dump_len": self.dump_len,
            "guide_lse_hint": v.hint[i] if v.dump == "token_weight" and v.hint is not None else None,
            "logits": v.logits[i],
            "guide_lse": None if v.guide_lse is None else v.guide_lse[i],
        }

    def select(self) -> None:
        """Gives every request of the group its next selection."""
        if not self.selects:
            return
        v, policy = self.verified, self.requests[0].policy
        budgets = [
            budget(request.ratio, request.min_tokens, keys, candidates)
            for request, keys, candidates in zip(self.requests, v.seqused_k, v.num_candidates, strict=True)
        ]
        window = policy.look_ahead_window(self.requests[0].gamma)
        for request, selection in zip(self.requests, policy.select(v, budgets, window), strict=True):
            request.selection = selection


def _stacked_sinks(model: Model, layers: Sequence[int]) -> Tensor | None:
    """(len(layers), num_heads_q), -inf where a layer has none; None if no layer has any."""
    sinks = [layer_attention(model)[i].sinks for i in layers]
    if all(s is None for s in sinks):
        return None
    absent = torch.full((model.num_heads_q,), -torch.inf, device=model.device)
    return torch.stack([absent if s is None else s for s in sinks])


class VerifyContext:
    """Full attention of every request's new rows, dumped as each group's policy wants."""

    def __init__(self, rows: Rows, groups: Sequence[VerifyGroup]) -> None:
        self.rows, self.groups = rows, groups

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.rows.cache.append(layer, self.rows.slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.groups:
            group.attend(layer, q, out)
        return out

    def select(self) -> None:
        for group in self.groups:
            group.select()


class DraftGroup:
    """Neighbours in a draft step that share a policy: one op call per layer."""

    def __init__(self, model: Model, rows: Rows, begin: int, requests: Sequence[Request]) -> None:
        self.model, self.rows, self.policy = model, rows, requests[0].policy
        self.layers = layer_attention(model)
        self.place = {layer: i for i, layer in enumerate(selecting_layers(model))}
        self.batch = slice(begin, begin + len(requests))
        selections: list[Selection] = []
        for request in requests:
            assert request.selection is not None, "drafting needs a selection"
            selections.append(request.selection)
        width = max(s.indices.shape[-1] for s in selections)
        lists = [pad(s.indices, (0, width - s.indices.shape[-1]), value=-1) for s in selections]
        self.indices = torch.stack(lists, 1)
        self.length = torch.stack([s.length for s in selections], 1)
        device = rows.cache.device
        self.tail_start = to_device([s.tail_start for s in selections], torch.int32, device)
        self.max_k = max(s.budget for s in selections)
        self.k = to_device([s.budget for s in selections], torch.int32, device)
        # Of a window's layer: no list, and a tail that the window clips.
        self.nothing = self.indices.new_empty((len(requests), 0))
        self.zeros = torch.zeros_like(self.tail_start)

    def _choose(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """The list of a policy that chooses anew for this very query."""
        cache, batch, keys = self.rows.cache, q.shape[0], max(self.rows.keys[self.batch])
        _, lse, logits, _ = ops.flash_attn_with_logit_dump(
            q,
            cache.k[layer],
            cache.v[layer],
            self.rows.block_table[self.batch],
            self.rows.seqused_k[self.batch],
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=q.device),
            max_seqlen_q=1,
            max_seqlen_k=keys,
            softmax_scale=self.model.softmax_scale,
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            dump="rows",
            dump_len=self.tail_start,
            workspace=_workspace(self.model, cache, "flash_attn_with_logit_dump", [1] * batch, [keys]),
            logits=q.new_empty((batch, self.model.num_heads_q, 2, keys), dtype=torch.float32),
            **self.layers[layer].options,
        )
        assert logits is not None
        sinks = self.layers[layer].sinks
        return self.policy.choose(logits, lse, sinks, self.tail_start, self.k, self.max_k)

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        cache, rows, q = self.rows.cache, self.rows, q[self.batch]
        tail_start = self.tail_start
        if layer not in self.place:
            indices, length, tail_start = self.nothing, self.zeros, self.zeros
        elif self.policy.chooses_per_step:
            indices, length = self._choose(layer, q)
        else:
            indices, length = self.indices[self.place[layer]], self.length[self.place[layer]]
        ops.sparse_paged_decode(
            q,
            cache.k[layer],
            cache.v[layer],
            indices,
            length,
            tail_start=tail_start,
            seqused_k=rows.seqused_k[self.batch],
            block_table=rows.block_table[self.batch],
            # Token indices outlive the pages that they lie in.
            indices_are_slots=False,
            softmax_scale=self.model.softmax_scale,
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            out=out[self.batch],
            workspace=_workspace(
                self.model,
                cache,
                "sparse_paged_decode",
                [1] * q.shape[0],
                rows.keys[self.batch],
                indices.shape[-1],
            ),
            **self.layers[layer].options,
        )


class DraftContext:
    """One row per request over its selected tokens and everything newer."""

    def __init__(self, rows: Rows, groups: Sequence[DraftGroup]) -> None:
        self.rows, self.groups = rows, groups

    def advance(self) -> None:
        """To the next position of every request: nothing but the lengths changes."""
        rows = self.rows
        rows.positions += 1
        rows.seqused_k += 1
        rows.keys = [n + 1 for n in rows.keys]
        rows.slots = rows.cache.slots(rows.block_table, rows.owner, rows.positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.rows.cache.append(layer, self.rows.slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.groups:
            group.attend(layer, q, out)
        return out
