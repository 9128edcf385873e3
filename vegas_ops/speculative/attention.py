"""The attention of the three phases: what `attend` does for a prompt, a verification, a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from vegas_ops import ops
from vegas_ops.speculative.kv_cache import PagedKVCache, to_device
from vegas_ops.speculative.model import KVTarget, Model, layer_attention, selecting_layers
from vegas_ops.speculative.request import Request
from vegas_ops.speculative.selection import Lists, Policy, Selection, Verified

if TYPE_CHECKING:
    from vegas_ops.speculative.round import Round


def _workspace(
    model: Model, cache: PagedKVCache, op: ops.OpName, batch: int, q_len: int, keys: int, max_k: int = 0
) -> Tensor | None:
    return cache.workspaces.get(
        op,
        max_batch=batch,
        max_q_len=q_len,
        max_seqlen_k=keys,
        max_k=max_k,
        layers=1,
        num_heads_q=model.num_heads_q,
        num_heads_kv=model.num_heads_kv,
        head_dim=model.head_dim,
    )


class Context:
    """Rows whose K and V are appended before they attend."""

    cache: PagedKVCache
    slots: Tensor

    def target(self, layer: int) -> KVTarget | None:
        return self.cache.target(layer, self.slots)

    def append(self, layer: int, k: Tensor | None, v: Tensor | None) -> None:
        """K and V of the rows, unless the model has written them."""
        if k is not None and v is not None:
            self.cache.append(layer, self.slots, k, v)


class PrefillContext(Context):
    """A chunk of one prompt; nothing is dumped.

    On a GPU torch's own attention serves many rows of a plain layer best, over gathered pages. On
    the CPU the verification's kernel does (fp32, 512 rows over 16K keys, one core: 1.7 times as fast
    as the best formulation in torch, bf16: level), and a text that is computed anew gets the same bits.
    """

    def __init__(self, model: Model, cache: PagedKVCache, request: Request, n: int) -> None:
        assert request.sequence is not None, "a request without pages cannot run"
        self.model, self.cache, self.sequence, self.n = model, cache, request.sequence, n
        self.keys = self.sequence.length + n
        self.positions = torch.arange(self.sequence.length, self.keys, device=cache.device)
        self.block_table = cache.block_table([self.sequence])
        self.slots = cache.slots(self.block_table, torch.zeros_like(self.positions), self.positions)
        self.seqused_k = to_device([self.keys], torch.int32, cache.device)
        self.cu_seqlens_q = to_device([0, n], torch.int32, cache.device)
        self.layers = layer_attention(model)
        self.by_torch = cache.device.type != "cpu"

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.append(layer, k, v)
        if self.by_torch and self.layers[layer].plain:
            return self._torch_attention(layer, q)
        return ops.flash_attn_with_logit_dump(
            q,
            self.cache.k[layer],
            self.cache.v[layer],
            self.block_table,
            self.seqused_k,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.n,
            max_seqlen_k=self.keys,
            softmax_scale=self.model.softmax_scale,
            k_descale=self.cache.k_descale,
            v_descale=self.cache.v_descale,
            dump="none",
            **self.layers[layer].options,
        )[0]

    def _torch_attention(self, layer: int, q: Tensor) -> Tensor:
        n, keys = self.n, self.keys
        k, v = self.cache.gather(layer, self.sequence, keys, q.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        # By flash attention, without a mask in memory.
        bias = causal_lower_right(n, keys)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=self.model.softmax_scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class Group:
    """Requests of a round that share a policy: one op call per layer and phase, one selection.

    They are rows [begin, begin + size) of the batch, of which some may be unused, and own `rows` rows
    of a verification, packed, from row_begin on. indices, length and guide_lse hold
    what the drafts attend to; tail_start, k and window come from the round.
    """

    def __init__(
        self, round: Round, begin: int, size: int, row_begin: int, rows: int, policy: Policy, max_k: int,
        window: int, max_rows: int,
    ) -> None:  # fmt: skip
        self.round, self.model, self.cache, self.policy = round, round.model, round.cache, policy
        self.size, self.rows, self.max_k, self.window, self.max_rows = size, rows, max_k, window, max_rows
        self.batch, self.span = slice(begin, begin + size), slice(row_begin, row_begin + rows)
        self.layers = layer_attention(self.model)
        self.place = {layer: i for i, layer in enumerate(selecting_layers(self.model))}  # in the lists
        layers, kv, device = len(self.place), self.model.num_heads_kv, self.cache.device
        lists = (layers, size, kv) if policy.per_kv_head else (layers, size)
        width = 0 if policy.chooses_per_step else max_k
        self.indices = torch.full((*lists, width), -1, dtype=torch.int32, device=device)
        self.length = torch.zeros(lists, dtype=torch.int32, device=device)
        self.guide_lse: Tensor | None = None
        if policy.keeps_guide:
            self.guide_lse = torch.zeros((layers, size, 2, kv), device=device)
        # Of a window's layer: no list, and a tail that the window clips.
        self.nothing = torch.empty((size, 0), dtype=torch.int32, device=device)
        self.zeros = torch.zeros(size, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(size + 1, dtype=torch.int32, device=device)
        self.stacked_sinks = _stacked_sinks(self.model, list(self.place))
        self.verified: Verified | None = None
        # A request's part of the buffers: views cost the host more than what it does with them.
        self._parts: list[tuple[Tensor, Tensor, Tensor | None]] = [
            (self.indices[:, i], self.length[:, i], None if self.guide_lse is None else self.guide_lse[:, i])
            for i in range(size)
        ]

    # Of the round, as seen by this group

    @property
    def block_table(self) -> Tensor:
        return self.round.block_table[self.batch]

    @property
    def tail_start(self) -> Tensor:
        return self.round.tail_start[self.batch]

    @property
    def k(self) -> Tensor:
        """The budgets of the selection that is drafted with."""
        return self.round.listed_k[self.batch]

    @property
    def seqused_k(self) -> Tensor:
        """Keys at the draft step that runs."""
        return self.round.draft_keys[self.round.step, self.batch]

    # Drafts

    def sinks(self, layer: int) -> Tensor | None:
        return self.layers[layer].sinks

    def dump(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Raw logits of a draft's queries over everything cached ("rows"), and lse."""
        keys = self.round.shape.max_keys
        _, lse, logits, _ = ops.flash_attn_with_logit_dump(
            q,
            self.cache.k[layer],
            self.cache.v[layer],
            self.block_table,
            self.seqused_k,
            cu_seqlens_q=torch.arange(self.size + 1, dtype=torch.int32, device=q.device),
            max_seqlen_q=1,
            max_seqlen_k=keys,
            softmax_scale=self.model.softmax_scale,
            k_descale=self.cache.k_descale,
            v_descale=self.cache.v_descale,
            dump="rows",
            dump_len=self.tail_start,
            workspace=_workspace(self.model, self.cache, "flash_attn_with_logit_dump", self.size, 1, keys),
            logits=q.new_empty((self.size, self.model.num_heads_q, 2, keys), dtype=torch.float32),
            **self.layers[layer].options,
        )
        assert logits is not None
        return logits, lse

    def draft(self, layer: int, q: Tensor, out: Tensor) -> None:
        """One row per request over its list and everything newer."""
        q, tail_start = q[self.batch], self.tail_start
        if layer not in self.place:
            indices, length, tail_start = self.nothing, self.zeros, self.zeros
        elif self.policy.chooses_per_step:
            indices, length = self.policy.choose(self, layer, q)
        else:
            indices, length = self.indices[self.place[layer]], self.length[self.place[layer]]
        ops.sparse_paged_decode(
            q,
            self.cache.k[layer],
            self.cache.v[layer],
            indices,
            length,
            tail_start=tail_start,
            seqused_k=self.seqused_k,
            block_table=self.block_table,
            # Token indices outlive the pages that they lie in.
            indices_are_slots=False,
            softmax_scale=self.model.softmax_scale,
            k_descale=self.cache.k_descale,
            v_descale=self.cache.v_descale,
            out=out[self.batch],
            workspace=_workspace(
                self.model,
                self.cache,
                "sparse_paged_decode",
                self.size,
                1,
                self.round.shape.max_keys,
                indices.shape[-1],
            ),
            **self.layers[layer].options,
        )

    # Verification

    def prepare(self, first: bool, selects: bool) -> None:
        """Where each row belongs, and room for what the verification leaves."""
        r, policy = self.round, self.policy
        dump = policy.dump(first) if selects else "none"
        logits, lse, guide_lse = self._room(dump)
        candidates = r.candidates[self.batch]
        last_only = policy.last_row_only and dump not in ("none", "all")
        self.verified = Verified(
            dump=dump,
            logits=logits,
            lse=lse,
            guide_lse=guide_lse,
            hint=self.guide_lse if selects and not first else None,
            cu_seqlens_q=self.cu_seqlens_q,
            owner=r.rows.owner[self.span],
            offset=r.rows.offset[self.span],
            candidates=candidates,
            seqused_k=r.seqused_k[self.batch],
            k=r.budgets[self.batch],
            num_accepted=r.num_accepted[self.batch],
            dump_rows=torch.full_like(candidates, 2) if last_only else None,
            seeds=r.seeds[self.batch],
            rounds=r.lengths[self.batch],
            block_table=self.block_table,
            cache=self.cache,
            num_heads_kv=self.model.num_heads_kv,
            sinks=self.stacked_sinks,
            lists=Lists(self.indices, self.length),
            width=r.shape.max_keys,
            max_k=self.max_k,
            max_rows=self.max_rows,
            window=self.window,
            first=first,
        )

    def _room(self, dump: ops.Dump) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Uninitialised logits, lse and guide_lse of `Verified`, for a dump of the layers from
        `first_dumped` on."""
        model, device, batch, width = self.model, self.cache.device, self.size, self.round.shape.max_keys
        layers, heads_q, heads_kv = len(self.place), model.num_heads_q, model.num_heads_kv
        dumped = min(1, layers) if self.policy.last_layer_only else layers
        self.first_dumped = layers - dumped
        shape = {
            "token": (dumped, batch, width),
            "token_weight": (dumped, batch, width),
            "kv_head": (dumped, batch, 2, heads_kv, width),
            "rows": (dumped, batch, heads_q, 2, width),
            "all": (dumped, self.rows, heads_q, width),
        }.get(dump)
        wide = dump in ("token", "token_weight") or model.dtype == torch.float32
        dtype = torch.float32 if wide else torch.bfloat16
        guide = dump in ("token_weight", "kv_head")
        return (
            None if shape is None else torch.empty(shape, dtype=dtype, device=device),
            torch.empty((layers, heads_q, self.rows), device=device),
            torch.empty((layers, batch, 2, heads_kv), device=device) if guide else None,
        )

    def verify(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Full attention of every request's rows."""
        v = self.verified
        assert v is not None
        i = self.place.get(layer)
        dump, lse = self._dump(v, i), None if i is None else v.lse[i]
        if self._dumps_apart(dump["dump"], layer):
            self._attend(layer, q, torch.empty_like(out), lse, dump)
            dump, lse = {"dump": "none"}, None
        self._attend(layer, q, out, lse, dump)

    def _dumps_apart(self, dump: ops.Dump, layer: int) -> bool:
        """Whether a dump takes a pass of its own: where the same bits are asked for, the output comes from
        the kernel that plain decoding runs, and on a GPU another one may write these dumps."""
        if not self.round.batch_invariant or self.cache.device.type == "cpu":
            return False
        return dump in ("rows", "all") or (dump != "none" and self.layers[layer].softcap > 0)

    def _attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None, dump: dict[str, Any]) -> None:
        v, cache = self.verified, self.cache
        assert v is not None
        ops.flash_attn_with_logit_dump(
            q[self.span],
            cache.k[layer],
            cache.v[layer],
            v.block_table,
            v.seqused_k,
            cu_seqlens_q=v.cu_seqlens_q,
            max_seqlen_q=self.max_rows,
            max_seqlen_k=v.width,
            softmax_scale=self.model.softmax_scale,
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            batch_invariant=self.round.batch_invariant,
            out=out[self.span],
            lse=lse,
            workspace=_workspace(
                self.model, cache, "flash_attn_with_logit_dump", self.size, self.max_rows, v.width
            ),
            **self.layers[layer].options,
            **dump,
        )

    def _dump(self, v: Verified, i: int | None) -> dict[str, Any]:
        """Arguments of the dump of the i-th layer that has lists."""
        if i is None or v.logits is None or i < self.first_dumped:
            return {"dump": "none"}
        return {
            "dump": v.dump,
            "dump_rows": v.dump_rows,
            # Scores that the policy normalises itself need every key, not the candidates alone.
            "dump_len": v.seqused_k if v.dump == "all" else v.candidates,
            "guide_lse_hint": v.hint[i] if v.dump == "token_weight" and v.hint is not None else None,
            "logits": v.logits[i - self.first_dumped],
            "guide_lse": None if v.guide_lse is None else v.guide_lse[i],
        }

    def select(self) -> None:
        """The lists of the next drafts."""
        assert self.verified is not None
        lists = self.policy.select(self.verified)
        if lists.indices is not self.indices:  # the policy's kernel did not write there
            width = min(self.indices.shape[-1], lists.indices.shape[-1])
            self.indices[..., :width] = lists.indices[..., :width]
            self.length.copy_(lists.length)
        if self.guide_lse is not None and lists.guide_lse is not None:
            self.guide_lse.copy_(lists.guide_lse)

    # Selections of single requests

    def selection(self, row: int, budget: int, tail_start: int) -> Selection:
        """Request `row`'s selection, as views."""
        indices, length, guide = self._parts[row]
        return Selection(
            indices.narrow(-1, 0, min(budget, indices.shape[-1])), length, budget, tail_start, guide
        )

    def adopt(self, row: int, selection: Selection) -> None:
        """Copies a selection that lies elsewhere into row `row`."""
        width = min(self.indices.shape[-1], selection.indices.shape[-1])
        self.indices[:, row, ..., :width] = selection.indices[..., :width]
        self.length[:, row] = selection.length
        if self.guide_lse is not None and selection.guide_lse is not None:
            self.guide_lse[:, row] = selection.guide_lse


def _stacked_sinks(model: Model, layers: Sequence[int]) -> Tensor | None:
    """(len(layers), num_heads_q), -inf where a layer has none; None if no layer has any."""
    sinks = [layer_attention(model)[i].sinks for i in layers]
    if all(s is None for s in sinks):
        return None
    absent = torch.full((model.num_heads_q,), -torch.inf, device=model.device)
    return torch.stack([absent if s is None else s for s in sinks])


class DraftContext(Context):
    """A draft step: one row per request."""

    def __init__(self, round: Round, groups: Sequence[Group], slots: Tensor) -> None:
        self.cache, self.groups, self.slots = round.cache, groups, slots

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.append(layer, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.groups:
            group.draft(layer, q, out)
        return out


class VerifyContext(DraftContext):
    """A verification: full attention, dumped as each group's policy wants."""

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.append(layer, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.groups:
            group.verify(layer, q, out)
        return out
