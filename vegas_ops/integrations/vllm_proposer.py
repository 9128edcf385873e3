"""The proposer of vLLM's method "draft_model", with the target itself as the draft model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vegas_ops.integrations.vllm_attention import attach, register_backends, restricted
from vegas_ops.integrations.vllm_graphs import DraftGraphs


class SelfDraftProposer(DraftModelProposer):
    """Drafts with the target's weights, layers and cache; draft steps, sampling, draft probabilities
    and the dispatch of graphs are the base's."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        # Before the target's layers are made.
        register_backends()
        if device.type == "cpu":
            from vegas_ops.integrations.vllm_cpu import repair_sampling

            repair_sampling()
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._num_rejected: Tensor | None = None
        self._graphs: DraftGraphs | None = None

    def load_model(self, target_model: Any) -> None:
        self.model = target_model
        self.guidance, names = attach(self.vllm_config, self.device)
        self._draft_attn_layer_names = set(names)
        if self.device.type == "cuda" and self._runner is not None:
            # The piecewise graphs of target and drafts are the same, and read from fixed addresses.
            self.input_ids, self.positions = self._runner.input_ids.gpu, self._runner.positions

    def dummy_run(
        self, num_tokens: int, *arguments: Any, is_graph_capturing: bool = False, **options: Any
    ) -> None:
        # Data parallel ranks draft in step with each other, with graphs of vLLM's own.
        alone = self.vllm_config.parallel_config.data_parallel_size == 1
        if is_graph_capturing and alone and not self.speculative_config.enforce_eager:
            if self._graphs is None:
                self._graphs = DraftGraphs(
                    self.model, self.vllm_config, self.input_ids, self.positions, self._slot_mapping_buffer,
                    -(-self.max_model_len // self.block_size),
                )  # fmt: skip
                self.model = self._graphs
            self._graphs.capture()
        super().dummy_run(num_tokens, *arguments, is_graph_capturing=is_graph_capturing, **options)

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, Tensor | None]:
        size = self._graphs.size_for(num_tokens) if self._graphs is not None and use_cudagraphs else None
        if size is None:
            return super()._determine_batch_execution_and_padding(num_tokens, use_cudagraphs)
        return CUDAGraphMode.NONE, size, None

    def propose(
        self,
        *arguments: Any,
        target_hidden_states: Tensor,
        num_rejected_tokens_gpu: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        # The base would subtract them after its first pass; ours starts behind them.
        self._num_rejected = num_rejected_tokens_gpu
        # Replays of shared graphs overwrite what the logprobs of prompts are still to be made of.
        prompt_logprobs = getattr(self._runner, "num_prompt_logprobs", None)
        kept = target_hidden_states.clone() if prompt_logprobs else None
        drafts = super().propose(
            *arguments, target_hidden_states=target_hidden_states, num_rejected_tokens_gpu=None, **options
        )
        if kept is not None:
            target_hidden_states.copy_(kept)
        return drafts

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """One row per request: the token that follows the accepted ones."""
        n = cad.batch_size()
        length = cad.seq_lens[:n]
        if self._num_rejected is not None:
            length = length - self._num_rejected[:n]
        position = length.clamp(max=self.max_model_len - 1).long()
        page = cad.block_table_tensor[:n].gather(1, (position // self.block_size)[:, None])[:, 0]
        slots = page.long() * self.block_size + position % self.block_size
        slots = slots.masked_fill(length >= self.max_model_len, PADDING_SLOT_ID)
        self.input_ids[:n] = next_token_ids[:n]
        self.positions[:n] = position
        rows, keys, table = self.arange[:n], (position + 1).int(), cad.block_table_tensor[:n]
        if self._graphs is not None and self._graphs.size_for(n) is not None:
            keys, table = self._graphs.load(keys, table)
        return n, rows, restricted(
            cad, None,
            query_start_loc=self.arange[: n + 1],
            query_start_loc_cpu=torch.from_numpy(self.token_arange_np[: n + 1]).clone(),
            seq_lens=keys,
            block_table_tensor=table,
            num_reqs=n,
            num_actual_tokens=n,
            max_query_len=1,
            max_seq_len=min(cad.max_seq_len + 1, self.max_model_len),
            slot_mapping=slots,
        )  # fmt: skip
