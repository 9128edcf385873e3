"""Draft steps on buffers of fixed addresses, on GPUs in CUDA graphs, attention included: vLLM captures
those of drafts in pieces, and prepares the next step's inputs on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vegas_ops.integrations.vllm_attention import DraftMetadata, attention_layers


def graph_sizes(max_batch: int) -> list[int]:
    """Rows that graphs are captured for: powers of 2, then multiples of 16, up to the largest batch."""
    sizes = {1 << i for i in range(5)} | set(range(16, max_batch + 1, 16)) | {max_batch}
    return sorted(n for n in sizes if n <= max_batch)


class DraftSteps:
    """Draft steps of a batch: a forward, its tokens, and the next step's inputs.

    A step reads input_ids, positions and slots, the proposer's own buffers, and `keys` and `table`,
    which `load` fills. Rows beyond a batch have no keys and no slot. Where tokens are drawn greedily a
    graph holds a whole step, else vLLM's sampling runs between two.

    greedy_sample: hidden states (n, hidden) to token ids (n,).
    """

    def __init__(
        self, model: Any, vllm_config: Any, input_ids: Tensor, positions: Tensor, slots: Tensor,
        page_size: int, greedy_sample: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.model, self.vllm_config = model, vllm_config
        self.layers = attention_layers(vllm_config)
        self.input_ids, self.positions, self.slots = input_ids, positions, slots
        self.page_size, self.greedy_sample = page_size, greedy_sample
        self.max_keys = vllm_config.model_config.max_model_len
        self.sizes = graph_sizes(vllm_config.scheduler_config.max_num_seqs)
        rows, device = self.sizes[-1], input_ids.device
        self.keys = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table = torch.zeros((rows, -(-self.max_keys // page_size)), dtype=torch.int32, device=device)
        gamma = vllm_config.speculative_config.num_speculative_tokens
        self.drafts = torch.zeros((rows, gamma), dtype=torch.int64, device=device)  # the latest is last
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # of the running step
        self._forwards: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._advances: dict[int, torch.cuda.CUDAGraph] = {}
        self._steps: dict[int, torch.cuda.CUDAGraph] = {}
        self._cache_address = 0

    def _address(self) -> int:
        return next(iter(self.layers.values())).kv_cache.data_ptr()

    def size_for(self, n: int) -> int | None:
        """Rows of the graph that serves a batch of n; None if there is none for the cache in use."""
        if not self._steps or self._address() != self._cache_address:
            return None
        return next((size for size in self.sizes if size >= n), None)

    def load(self, keys: Tensor, table: Tensor, slots: Tensor) -> None:
        """A batch's lengths, block table and slots, to the addresses that steps read."""
        n = keys.shape[0]
        self.keys.zero_()
        self.keys[:n] = keys
        self.table[:n, : table.shape[1]] = table
        self.slots[:n] = slots
        self.slots[n : self.sizes[-1]].fill_(PADDING_SLOT_ID)

    def capture(self) -> None:
        """Graphs per size, unless there are some for this cache: vLLM first captures beside a small
        cache, to see what memory it takes."""
        if self._address() == self._cache_address:
            return
        self._forwards.clear()
        self._advances.clear()
        self._steps.clear()
        self.keys.zero_()
        self.slots.fill_(PADDING_SLOT_ID)
        pool = torch.cuda.graph_pool_handle()
        for n in reversed(self.sizes):
            for _ in range(2):
                self._greedy_step(n)
            graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
            with torch.cuda.graph(graphs[0], pool=pool, stream=torch.cuda.current_stream()):
                hidden = self._forward(n)
            with torch.cuda.graph(graphs[1], pool=pool, stream=torch.cuda.current_stream()):
                self._advance(n)
            with torch.cuda.graph(graphs[2], pool=pool, stream=torch.cuda.current_stream()):
                self._greedy_step(n)
            self._forwards[n] = graphs[0], hidden
            self._advances[n], self._steps[n] = graphs[1:]
        self._cache_address = self._address()

    def greedy(self, n: int, steps: int) -> Tensor:
        """Token ids (n, steps), for a batch of n whose inputs lie in the buffers."""
        size = self.size_for(n)
        for _ in range(steps):
            if size is None:
                self._greedy_step(n)
            else:
                self._steps[size].replay()
        return self.drafts[:n, -steps:].clone()

    def sampled(
        self, n: int, steps: int, sample: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Token ids (n, steps) and the probabilities they were drawn with, (n, steps, vocab_size).

        sample: hidden states (n, hidden) to token ids (n,) and (n, vocab_size) probabilities.
        """
        size, probabilities = self.size_for(n), []
        for _ in range(steps):
            if size is None:
                hidden = self._forward(n)
            else:
                graph, hidden = self._forwards[size]
                graph.replay()
            self.tokens[:n], p = sample(hidden[:n])
            probabilities.append(p)
            if size is None:
                self._advance(n)
            else:
                self._advances[size].replay()
        return self.drafts[:n, -steps:].clone(), torch.stack(probabilities, 1)

    def _greedy_step(self, n: int) -> None:
        self.tokens[:n] = self.greedy_sample(self._forward(n))
        self._advance(n)

    def _advance(self, n: int) -> None:
        """Notes the step's tokens, and makes them the next one's inputs."""
        token = self.tokens[:n]
        self.drafts[:n] = torch.cat([self.drafts[:n, 1:], token[:, None]], 1)
        keys, position = self.keys[:n], self.positions[:n] + 1
        over = (keys == 0) | (position >= self.max_keys)
        position = position.masked_fill(over, 0)
        page = self.table[:n].gather(1, (position // self.page_size)[:, None])[:, 0]
        slots = page.long() * self.page_size + position % self.page_size
        self.input_ids[:n] = token
        self.positions[:n] = position
        self.slots[:n] = slots.masked_fill(over, PADDING_SLOT_ID)
        self.keys[:n] = (keys + 1).masked_fill(over, 0)

    def _forward(self, n: int) -> Tensor:
        metadata = DraftMetadata(n, self.keys[:n], self.table[:n])
        with set_forward_context(
            dict.fromkeys(self.layers, metadata),
            self.vllm_config,
            num_tokens=n,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self.layers, self.slots[:n]),
        ):
            return self.model(input_ids=self.input_ids[:n], positions=self.positions[:n], inputs_embeds=None)
