"""The driver with models whose layers have windows, softcap and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_model import TinyModel, new_cache
from torch import Tensor

from vegas_ops.speculative import (
    POLICIES,
    VEGAS,
    VEGAS_LOOKAHEAD,
    Full,
    LayerAttention,
    Policy,
    Request,
    SpeculativeDecoder,
    TopkOracle,
    Vegas,
)

WINDOW = 9
PROMPTS = [
    torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 7, 40, 90)
]
SAMPLE = [
    *POLICIES.values(),
    Vegas(score="weight"),
    Vegas(score="weight", rows="last"),
    Vegas(score="weight", rows="collect-all"),
    Vegas(score="weight", per_kv_head=True),
    Vegas(score="group", per_kv_head=True),
]


def sinks(seed: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed)) * 2


def tiny(layers: list[LayerAttention], **options: Any) -> TinyModel:
    model = TinyModel(num_layers=len(layers), seed=5, **options)
    model.layer_attention = layers  # type: ignore[attr-defined]
    return model


def mixed_layers(device: str = "cpu") -> list[LayerAttention]:
    return [
        LayerAttention(window=WINDOW, sinks=sinks(1).to(device)),
        LayerAttention(sinks=sinks(2).to(device)),
        LayerAttention(window=WINDOW, softcap=3.0),
        LayerAttention(softcap=2.0),
    ]


@pytest.fixture(scope="module")
def mixed() -> TinyModel:
    return tiny(mixed_layers())


def dense(model: TinyModel, text: list[int]) -> Tensor:
    """Logits (n, vocab_size) of a text, with attention as the formula says, in fp64."""
    n, device = len(text), model.device
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)[None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = model.layer_attention[layer]  # type: ignore[attr-defined]
        k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q.double(), k) * model.softmax_scale
        if a.softcap:
            logits = a.softcap * torch.tanh(logits / a.softcap)
        hidden = (j > i) if a.window is None else (j > i) | (j <= i - a.window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if a.sinks is not None:
            logits = torch.cat([logits, a.sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        return torch.einsum("hij,jhd->ihd", logits.softmax(-1)[..., :n], v).to(q.dtype)

    hidden = model.forward(torch.tensor(text, device=device), torch.arange(n, device=device), attend)
    return model.compute_logits(hidden)


def decode(
    model: TinyModel, policy: Policy = VEGAS, gamma: int = 4, prompts: list[list[int]] = PROMPTS
) -> list[Request]:
    requests = [
        Request(p, gamma=gamma, policy=policy, ratio=0.1, min_tokens=4, max_new_tokens=30) for p in prompts
    ]
    SpeculativeDecoder(model, new_cache(model), prefill_chunk=16).generate(requests)
    return requests


@pytest.fixture(scope="module")
def plain(mixed: TinyModel) -> list[list[int]]:
    return [request.output for request in decode(mixed, gamma=0)]


def test_plain_decoding_is_what_the_formula_says(mixed: TinyModel, plain: list[list[int]]) -> None:
    for prompt, output in zip(PROMPTS, plain, strict=True):
        logits = dense(mixed, [*prompt, *output[:-1]])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output


@pytest.mark.parametrize("policy", SAMPLE, ids=lambda p: p.name)
def test_every_policy_is_lossless(mixed: TinyModel, plain: list[list[int]], policy: Policy) -> None:
    requests = decode(mixed, policy)
    assert [request.output for request in requests] == plain
    assert all(request.statistics.drafted > 0 for request in requests)


def test_layers_with_a_window_draft_with_all_of_it(mixed: TinyModel) -> None:
    """Drafts that see everything are verified unchanged."""
    for request in decode(mixed, Full()):
        assert request.statistics.accepted == request.statistics.drafted > 0


@pytest.mark.parametrize("policy", [Vegas(score="weight"), TopkOracle()], ids=lambda p: p.name)
def test_sinks_take_their_share_of_the_weights(policy: Policy) -> None:
    """A head that gives nearly all to its sink has no say in the selection."""
    quiet = torch.tensor([0.0, 60.0, 60.0, 60.0])
    model, alone = tiny([LayerAttention(sinks=quiet)]), {}

    class Recorder:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def forward(self, token_ids: Tensor, positions: Tensor, attend: object) -> Tensor:
            def record(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                for row, position in enumerate(positions.tolist()):
                    alone[position] = (q[row, 0].double(), k[row, 0].double())
                return attend(layer, q, k, v)  # type: ignore[operator]

            return model.forward(token_ids, positions, record)

    decoder = SpeculativeDecoder(Recorder(), new_cache(model))  # type: ignore[arg-type]
    request = decoder.add(Request(PROMPTS[2], gamma=2, policy=policy, ratio=0.0, min_tokens=5))
    chosen: list[list[int]] = []
    if policy.chooses_per_step:
        choose = TopkOracle.choose

        class Spy(TopkOracle):
            def choose(self, *arguments: object) -> object:
                result = choose(self, *arguments)  # type: ignore[arg-type]
                chosen.append(result[0][0].tolist())
                return result

        request.policy = Spy()
    decoder.step()
    if policy.chooses_per_step:
        decoder.step()
        query = alone[len(PROMPTS[2])][0]
    else:
        assert request.selection is not None
        chosen.append(request.selection.indices[0].tolist())
        query = alone[len(PROMPTS[2]) - 1][0]
    scores = torch.stack([alone[p][1] @ query for p in range(len(PROMPTS[2]))])
    assert chosen[0] == sorted(scores.topk(5).indices.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_on_a_gpu(cuda: torch.device, dtype: torch.dtype) -> None:
    """Prompt, verification and drafts: every emitted token is near the formula's best, and drafts that
    see everything are kept but for rounding."""
    model = tiny(mixed_layers("cuda"), dtype=dtype, device="cuda", head_dim=64, max_position=2048)
    prompts = [
        torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 150, 900)
    ]
    for policy in SAMPLE:
        for request in decode(model, policy, prompts=prompts):
            logits = dense(model, request.tokens[:-1])[len(request.prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(request.output, device=cuda)[:, None])[:, 0]
            assert ((logits.amax(-1) - chosen) <= 0.1 * logits.std(-1)).float().mean() > 0.9
            s = request.statistics
            assert s.drafted > 0
            if policy == Full():
                assert s.accepted > 0.8 * s.drafted


def test_a_model_of_windows_alone_is_decoded_plainly() -> None:
    model = tiny([LayerAttention(window=WINDOW), LayerAttention(window=2 * WINDOW)])
    plain = [request.output for request in decode(model, gamma=0)]
    for policy in (VEGAS, VEGAS_LOOKAHEAD, TopkOracle()):
        requests = decode(model, policy)
        assert [request.output for request in requests] == plain
        assert all(request.statistics.drafted == 0 for request in requests)
    padded = SpeculativeDecoder(model, new_cache(model))
    padded.fixed_shapes = True
    assert padded.generate([Request(p, gamma=4, max_new_tokens=30) for p in PROMPTS]) == plain
    assert all(shape.steps == 0 for shape in padded._rounds), "no forwards for drafts that nobody wants"


def test_bytes_count_a_window_once(mixed: TinyModel) -> None:
    decoder = SpeculativeDecoder(mixed, new_cache(mixed))
    request = decoder.add(Request(PROMPTS[3], gamma=3, ratio=0.0, min_tokens=10))
    decoder.step()
    decoder.step()
    per_layer = decoder.cache.bytes_per_token // 4
    statistics = request.statistics
    # Two full layers: 10 listed and a tail of 1, 2, 3; two windows of 9. Then 4 rows over 94 keys.
    assert statistics.draft_bytes == (2 * (11 + 12 + 13) + 2 * 3 * WINDOW) * per_layer
    assert statistics.verify_bytes == (2 * 94 + 2 * (WINDOW + 3)) * per_layer
