"""The proposer of vLLM's method "draft_model", with the target itself as the draft model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vegas_ops.integrations.vllm_attention import attach, register_backends, restricted
from vegas_ops.integrations.vllm_graphs import DraftSteps


class SelfDraftProposer(DraftModelProposer):
    """Drafts with the target's weights, layers and cache; how tokens are drawn is the base's, and where
    data parallel ranks draft in step with each other the whole loop."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        # Before the target's layers are made.
        register_backends()
        if device.type == "cpu":
            from vegas_ops.integrations.vllm_cpu import repair_sampling

            repair_sampling()
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._num_rejected: Tensor | None = None
        self._steps: DraftSteps | None = None

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
        if is_graph_capturing and self._alone() and not self.speculative_config.enforce_eager:
            self._draft_steps().capture()
        super().dummy_run(num_tokens, *arguments, is_graph_capturing=is_graph_capturing, **options)

    def _alone(self) -> bool:
        return self.vllm_config.parallel_config.data_parallel_size == 1

    def _draft_steps(self) -> DraftSteps:
        if self._steps is None:
            self._steps = DraftSteps(
                self.model, self.vllm_config, self.input_ids, self.positions, self._slot_mapping_buffer,
                self.block_size, self._greedy_sample,
            )  # fmt: skip
        return self._steps

    def propose(
        self,
        num_speculative_tokens: int,
        *,
        next_token_ids: Tensor,
        target_hidden_states: Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        num_rejected_tokens_gpu: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if not num_speculative_tokens:
            # A schedule by batch size may ask for none; the cache is the target's, and complete.
            self._last_draft_probs = None
            return next_token_ids.new_empty((common_attn_metadata.batch_size(), 0), dtype=torch.int64)
        # The base would subtract them after its first pass; ours starts behind them.
        self._num_rejected = num_rejected_tokens_gpu
        # Replays of shared graphs overwrite what the logprobs of prompts are still to be made of.
        prompt_logprobs = getattr(self._runner, "num_prompt_logprobs", None)
        kept = target_hidden_states.clone() if prompt_logprobs else None
        greedy = sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs
        if self._alone():
            self.num_speculative_tokens, self._last_draft_probs = num_speculative_tokens, None
            keys, slots = self._first_inputs(next_token_ids, common_attn_metadata)
            n, steps = keys.shape[0], self._draft_steps()
            steps.load(keys, common_attn_metadata.block_table_tensor[:n], slots)
            if greedy:
                drafts = steps.greedy(n, num_speculative_tokens)
            else:
                drafts, self._last_draft_probs = steps.sampled(
                    n,
                    num_speculative_tokens,
                    lambda hidden: self._sample_draft_tokens(hidden, sampling_metadata),
                )
        else:
            drafts = super().propose(
                num_speculative_tokens,
                next_token_ids=next_token_ids,
                target_hidden_states=target_hidden_states,
                common_attn_metadata=common_attn_metadata,
                sampling_metadata=sampling_metadata,
                num_rejected_tokens_gpu=None,
                **options,
            )
        if kept is not None:
            target_hidden_states.copy_(kept)
        return drafts

    def _first_inputs(self, next_token_ids: Tensor, cad: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
        """One row per request: the token that follows the accepted ones. Its keys, itself included, and
        its slot; token and position go into the buffers."""
        n = cad.batch_size()
        length = cad.seq_lens[:n]
        if self._num_rejected is not None:
            length = length - self._num_rejected[:n]
        position = length.clamp(max=self.max_model_len - 1).long()
        page = cad.block_table_tensor[:n].gather(1, (position // self.block_size)[:, None])[:, 0]
        slots = page.long() * self.block_size + position % self.block_size
        self.input_ids[:n] = next_token_ids[:n]
        self.positions[:n] = position
        return (position + 1).int(), slots.masked_fill(length >= self.max_model_len, PADDING_SLOT_ID)

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
        keys, slots = self._first_inputs(next_token_ids, cad)
        n = keys.shape[0]
        return n, self.arange[:n], restricted(
            cad, None,
            query_start_loc=self.arange[: n + 1],
            query_start_loc_cpu=torch.from_numpy(self.token_arange_np[: n + 1]).clone(),
            seq_lens=keys,
            block_table_tensor=cad.block_table_tensor[:n],
            num_reqs=n,
            num_actual_tokens=n,
            max_query_len=1,
            max_seq_len=min(cad.max_seq_len + 1, self.max_model_len),
            slot_mapping=slots,
        )  # fmt: skip
