"""Self-speculation through vLLM's method "custom_class" alone, without a replaced proposer.

    speculative_config={"method": "custom_class", "num_speculative_tokens": 6,
        "model": "vegas_ops.integrations.vllm_custom_class.CustomClassProposer"},
    scheduler_cls="vegas_ops.integrations.vllm_custom_class.LookaheadScheduler",
    additional_config={"vegas_ops": {}}

The fallback for a vLLM whose draft-model proposer has changed. vLLM drops the draft probabilities of
this method, so drafts are greedy: sampled output keeps its distribution, but fewer drafts survive.
Tokens go through the host, and drafts run without CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.scheduler import Scheduler

from vegas_ops.integrations.vllm import check, check_installed
from vegas_ops.integrations.vllm_attention import DraftMetadata, attach, register_backends


class LookaheadScheduler(Scheduler):
    """Reserves the slots that drafts write to; vLLM's own does so for draft models alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_lookahead_tokens = self.num_spec_tokens


class CustomClassProposer:
    """Drafts greedily with the target, one row per request that has emitted a token."""

    def __init__(self, vllm_config: Any) -> None:
        check(vllm_config, check_installed())
        register_backends()
        self.vllm_config = vllm_config
        self.gamma = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len

    def load_model(self, target_model: Any) -> None:
        self.model = target_model
        self.device = next(target_model.parameters()).device
        self.guidance, self.layers = attach(self.vllm_config, self.device)

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """gamma tokens for each request that emitted any and has room for them, else none.

        num_tokens_no_spec: (max_batch,) known tokens of each request, those emitted included.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        live = [
            i
            for i, new in enumerate(sampled_token_ids)
            if new and int(num_tokens_no_spec[i]) + self.gamma < self.max_model_len
        ]
        if not live:
            return drafts
        rows = torch.tensor(live, device=self.device)
        length = torch.tensor([int(num_tokens_no_spec[i]) for i in live], device=self.device)
        tokens = torch.tensor([sampled_token_ids[i][-1] for i in live], device=self.device)
        steps = []
        for step in range(self.gamma):
            tokens = self._step(tokens, length + step, rows)
            steps.append(tokens)
        for i, new in zip(live, torch.stack(steps, 1).tolist(), strict=True):
            drafts[i] = new
        return drafts

    def _step(self, tokens: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        """The next token of each row; keys: (n,) int64, its own included."""
        verification = self.guidance.verification
        assert verification is not None, "vLLM proposes after a forward"
        block_table, page_size = verification.block_table[rows], verification.page_size
        positions = keys - 1
        page = block_table.gather(1, (positions // page_size)[:, None])[:, 0]
        slots = page.long() * page_size + positions % page_size
        metadata = DraftMetadata(len(rows), keys.int(), block_table, rows)
        with set_forward_context(
            dict.fromkeys(self.layers, metadata),
            self.vllm_config,
            num_tokens=len(rows),
            slot_mapping=dict.fromkeys(self.layers, slots),
        ):
            hidden = self.model(
                input_ids=tokens.int(), positions=positions, intermediate_tensors=None, inputs_embeds=None
            )
        return self.model.compute_logits(hidden).argmax(-1)
