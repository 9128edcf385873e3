"""CUDA graphs of whole draft steps, attention included: vLLM captures those of drafts in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context

from vegas_ops.integrations.vllm_attention import DraftMetadata, attention_layers


def graph_sizes(max_batch: int) -> list[int]:
    """Rows that graphs are captured for: powers of 2, then multiples of 16, up to the largest batch."""
    sizes = {1 << i for i in range(5)} | set(range(16, max_batch + 1, 16)) | {max_batch}
    return sorted(n for n in sizes if n <= max_batch)


class DraftGraphs:
    """Stands in for the model in draft steps: replays where it can, calls the model elsewhere.

    A graph reads input_ids, positions and slots, the proposer's own buffers, and `keys` and `table`,
    which `load` fills. Rows beyond a batch have no keys and no slot.
    """

    def __init__(
        self, model: Any, vllm_config: Any, input_ids: Tensor, positions: Tensor, slots: Tensor,
        block_table_width: int,
    ) -> None:  # fmt: skip
        self.model, self.vllm_config = model, vllm_config
        self.layers = attention_layers(vllm_config)
        self.input_ids, self.positions, self.slots = input_ids, positions, slots
        self.sizes = graph_sizes(vllm_config.scheduler_config.max_num_seqs)
        rows, device = self.sizes[-1], input_ids.device
        self.keys = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table = torch.zeros((rows, block_table_width), dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._cache_address = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def _address(self) -> int:
        return next(iter(self.layers.values())).kv_cache.data_ptr()

    def size_for(self, n: int) -> int | None:
        """Rows of the graph that serves a batch of n; None if there is none for the cache in use."""
        if self._address() != self._cache_address:
            return None
        return next((size for size in self.sizes if size >= n), None)

    def load(self, keys: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of a batch's lengths and block table at the addresses that the graphs read."""
        n = keys.shape[0]
        self.keys.zero_()
        self.keys[:n] = keys
        self.table[:n, : table.shape[1]] = table
        return self.keys[:n], self.table[:n]

    def capture(self) -> None:
        """One graph per size, unless there are some for this cache: vLLM first captures beside a small
        cache, to see what memory it takes."""
        if self._address() == self._cache_address:
            return
        self._graphs.clear()
        self.keys.zero_()
        self.slots.fill_(-1)
        pool = torch.cuda.graph_pool_handle()
        for n in reversed(self.sizes):
            for _ in range(2):
                self._forward(n)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                hidden = self._forward(n)
            self._graphs[n] = graph, hidden
        self._cache_address = self._address()

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

    def __call__(self, input_ids: Tensor, positions: Tensor, **options: Any) -> Any:
        n, drafting = input_ids.shape[0], get_forward_context().attn_metadata is not None
        if drafting and n in self._graphs and self._address() == self._cache_address:
            graph, hidden = self._graphs[n]
            graph.replay()
            return hidden
        return self.model(input_ids=input_ids, positions=positions, **options)
