"""`generate` for transformers in bf16: every token is what the model ranks first, as far as bf16 tells.

Rounding may send a token to another expert, in transformers' own decoding as well, and then the logits
are others. So models with experts are asked with the experts that each token had: what remains is what
rounding does to any model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from test_transformers import SPECULATION, batch_of, random_model

from vegas_ops.integrations.transformers import MODEL_TYPES, generate
from vegas_ops.integrations.transformers_model import EXPERTS

PROMPT = 80


class Routes:
    """What every router of a model gave for each position of a text; `replay` makes it give that again.

    A position's last pass is its verification's, whose keys and logits are those that count.
    """

    def __init__(self, model: Any) -> None:
        self.kept: dict[tuple[str, int], dict[int, Tensor]] = {}
        self.positions: list[int] = []
        self.hooks = [model.base_model.register_forward_pre_hook(self._see, with_kwargs=True)]
        self._each_router(model, self._keep)

    def replay(self, model: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self._each_router(model, self._give)

    def _each_router(self, model: Any, do: Any) -> None:
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ("gate", "router"):
                hook = module.register_forward_hook(lambda m, x, out, name=name: do(name, out))
                self.hooks.append(hook)

    def _see(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        self.positions = options["position_ids"].flatten().tolist()

    def _keep(self, name: str, out: Any) -> None:
        for i, part in enumerate(out if isinstance(out, tuple) else (out,)):
            rows = part.clone().flatten(0, -2)
            self.kept.setdefault((name, i), {}).update(zip(self.positions, rows, strict=True))

    def _give(self, name: str, out: Any) -> Any:
        parts = out if isinstance(out, tuple) else (out,)
        given = []
        for i, part in enumerate(parts):
            rows = self.kept[name, i]
            given.append(torch.stack([rows[p] for p in range(len(rows))]).to(part.dtype).view_as(part))
        return tuple(given) if isinstance(out, tuple) else given[0]


def assert_ranked_first(kind: str, device: torch.device | str) -> None:
    """The first row's new tokens have the best logit of a forward over the whole text, or one as close to
    it as the logits of that forward are to those in fp32, or 3 % of the largest where that is more."""
    lengths = [PROMPT] if kind in EXPERTS else [PROMPT, 30]  # positions are those of a single row
    # Of 120 tokens at most; with random weights drafts that read fewer are seldom accepted, or never.
    speculation = {**SPECULATION, "min_tokens": 90 if kind in EXPERTS else 60}
    model = random_model(kind, eos_token_id=None).to(device, torch.bfloat16)
    exact = random_model(kind, eos_token_id=None).bfloat16().to(device, torch.float32)
    batch = {name: x.to(device) for name, x in batch_of(*lengths).items()}
    routes = Routes(model) if kind in EXPERTS else None
    result = generate(
        model, **batch, max_new_tokens=40, do_sample=False, return_dict_in_generate=True, **speculation
    )
    assert result.sequences.shape == (len(lengths), PROMPT + 40)
    assert sum(s.drafted for s in result.statistics) > sum(s.accepted for s in result.statistics) > 0
    if routes is not None:
        assert routes.kept
        for other in (model, exact):
            routes.replay(other)
    text = result.sequences[:1]
    with torch.no_grad():
        logits, fp32 = (m(text[:, :-1]).logits[0, PROMPT - 1 :].float() for m in (model, exact))
    gap = logits.amax(-1) - logits.gather(1, text[0, PROMPT:, None])[:, 0]
    rounding = max((logits - fp32).abs().max().item(), 0.03 * logits.abs().max().item())
    assert gap.max().item() <= rounding


@pytest.mark.parametrize("kind", ["llama", *EXPERTS])
def test_tokens_are_what_the_model_ranks_first(kind: str) -> None:
    assert_ranked_first(kind, "cpu")


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_on_a_gpu_tokens_are_what_the_model_ranks_first(cuda: torch.device, kind: str) -> None:
    """Through CUDA graphs, but for models with experts."""
    assert_ranked_first(kind, cuda)


@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu_samples_repeat(cuda: torch.device, graphs: bool) -> None:
    model = random_model("llama", eos_token_id=None).to(cuda, torch.bfloat16)
    batch = {name: x.to(cuda) for name, x in batch_of(PROMPT, 30).items()}
    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}

    def sample() -> Tensor:
        torch.manual_seed(3)
        return generate(
            model, **batch, do_sample=True, max_new_tokens=40, graphs=graphs, **filters, **SPECULATION
        )

    first = sample()
    torch.testing.assert_close(sample(), first, rtol=0, atol=0)
    assert first[:, PROMPT:].unique().numel() > 8
