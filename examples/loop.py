"""The whole loop with nothing but the three ops: greedy self-speculation of one request.

An engine-neutral driver with batches, sampling and rollback is `vegas_ops.speculative`.
"""

import argparse
import inspect
import math

import torch

import vegas_ops
from vegas_ops.models import Qwen3Model, Tokenizer
from vegas_ops.session import DEMO_MODEL

GAMMA, RATIO, MIN_TOKENS, PAGE_SIZE, NEW_TOKENS = 6, 0.07, 256, 64, 64

model = Qwen3Model.from_pretrained(DEMO_MODEL, torch.float32)
tokenizer = Tokenizer(DEMO_MODEL)
prompt = tokenizer.encode(inspect.getsource(argparse))[:4000]
pages = math.ceil((len(prompt) + NEW_TOKENS + 2 * GAMMA) / PAGE_SIZE)
block_table = torch.arange(pages, dtype=torch.int32)[None]
shape = (2, model.num_layers, pages, PAGE_SIZE, model.num_heads_kv, model.head_dim)
k_cache, v_cache = torch.zeros(shape)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def forward(tokens, start, attention):
    """The target's choice after each token; `attention(layer, q)` runs after K and V are appended."""

    def attend(layer, q, k, v):
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[layer].flatten(0, 1)[start : start + len(tokens)] = new
        return attention(layer, q)

    hidden = model.forward(torch.tensor(tokens), torch.arange(start, start + len(tokens)), attend)
    return model.compute_logits(hidden).argmax(-1).tolist()


def verify(tokens, start, candidates, rows):
    """Full attention over the new tokens, and each layer's slots for the next drafts."""
    keys, selection = start + len(tokens), []
    k = min(max(math.ceil(RATIO * keys), MIN_TOKENS), candidates)

    def attention(layer, q):
        out, _, logits, _ = vegas_ops.flash_attn_with_logit_dump(
            q, k_cache[layer], v_cache[layer], block_table, int32(keys), cu_seqlens_q=int32(0, len(tokens)),
            max_seqlen_q=len(tokens), max_seqlen_k=keys, dump_rows=int32(rows), dump_len=int32(candidates),
        )  # fmt: skip
        selection.append(
            vegas_ops.topk_aggregate_logits(
                logits, dump="token", seqlens=int32(candidates), k=k, max_k=k, block_table=block_table,
                page_size=PAGE_SIZE,
            )
        )  # fmt: skip
        return out

    return forward(tokens, start, attention), selection


def draft(token, position, tail_start, selection):
    """One token with sparse attention."""

    def attention(layer, q):
        return vegas_ops.sparse_paged_decode(
            q, k_cache[layer], v_cache[layer], *selection[layer], tail_start=int32(tail_start),
            seqused_k=int32(position + 1), block_table=block_table,
        )[0]  # fmt: skip

    return forward([token], position, attention)[0]


def decode(gamma: int) -> tuple[list[int], int]:
    tail_start, rounds = len(prompt), 0
    target, selection = verify(prompt, 0, tail_start, rows=2)  # a prompt's last row chooses
    output = target[-1:]
    while len(output) < NEW_TOKENS:
        position, drafts = len(prompt) + len(output) - 1, []  # of the last token, whose K and V are missing
        for i in range(gamma):
            drafts.append(draft(([*output[-1:], *drafts])[-1], position + i, tail_start, selection))
        tail_start = position + 1
        target, selection = verify([output[-1], *drafts], position, tail_start, rows=3)
        accepted = 0
        while accepted < gamma and drafts[accepted] == target[accepted]:
            accepted += 1
        output += target[: accepted + 1]
        rounds += 1
    return output[:NEW_TOKENS], rounds


if __name__ == "__main__":
    with torch.inference_mode():
        plain, steps = decode(gamma=0)
        output, rounds = decode(GAMMA)
    print(tokenizer.decode(output))
    print(f"{NEW_TOKENS} tokens: {steps} plain steps or {rounds} verifications; identical: {output == plain}")
