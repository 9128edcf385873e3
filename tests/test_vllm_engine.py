"""The plugin in whole vLLM engines, on the CPU in fp32: what they emit is what they emit without it.

Engines run one after the other in this process; with tensor parallelism vLLM starts workers, which
find the plugin by its entry point.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_speculation import p_value

pytest.importorskip("vllm")

# Read when vLLM is imported or starts its engine.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)

import tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vegas_ops.integrations import vllm as plugin
from vegas_ops.integrations import vllm_attention
from vegas_ops.integrations.vllm_cpu import GuidedCPUImpl
from vegas_ops.integrations.vllm_guidance import Options
from vegas_ops.integrations.vllm_proposer import SelfDraftProposer
from vegas_ops.session import DEMO_MODEL

GAMMA = 4
PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"
FEW = {"min_tokens": 8}  # of some hundreds: drafts differ from the target
# A scheduler that is always short of rows and pages: prompts come in chunks, among verifications, and
# requests are preempted.
TIGHT = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 34, "block_size": 32, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights whose next token depends on the text, and is seldom a close call."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    random_model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
            tie_word_embeddings=False, eos_token_id=0, bos_token_id=0, pad_token_id=1,
        )
    )  # fmt: skip
    for parameter in random_model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 3
    random_model.save_pretrained(folder)
    return str(folder)


@contextmanager
def engine(model: str, options: dict[str, Any] | None = None, **changes: Any) -> Iterator[LLM]:
    """vLLM, with the plugin if options are given."""
    arguments: dict[str, Any] = {
        "model": model, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True,
        "disable_log_stats": False, "skip_tokenizer_init": True, "seed": 0,
    }  # fmt: skip
    if options is not None:
        arguments["additional_config"] = {"vegas_ops": options}
        arguments["speculative_config"] = {
            "method": "draft_model", "model": model, "num_speculative_tokens": GAMMA
        }  # fmt: skip
    llm = LLM(**{**arguments, **changes})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 320, (n,), generator=generator).tolist() for n in lengths]


def generate(llm: LLM, texts: list[list[int]], **sampling: Any) -> list[list[int]]:
    parameters = {"temperature": 0, "max_tokens": 100, "ignore_eos": True, "detokenize": False, **sampling}
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in texts], SamplingParams(**parameters), use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: LLM, name: str) -> int:
    return int(sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}"))


def accepted(llm: LLM) -> tuple[int, int, int]:
    """Verifications, drafts, accepted drafts since the engine started, as vLLM exports them."""
    return (
        metric(llm, "spec_decode_num_drafts"),
        metric(llm, "spec_decode_num_draft_tokens"),
        metric(llm, "spec_decode_num_accepted_tokens"),
    )


TEXTS = prompts(300, 20, 150, 40, 5, 470, 310)
TEXTS += [TEXTS[0] + [7, 8, 9], TEXTS[5][:256]]  # prefixes of others


@pytest.fixture(scope="module")
def plain(model: str) -> list[list[int]]:
    """What vLLM emits without speculation."""
    with engine(model) as llm:
        return generate(llm, TEXTS)


def test_the_plugin_is_installed() -> None:
    found = entry_points(group="vllm.general_plugins")
    assert {point.load() for point in found if point.name == "vegas_ops"} == {plugin.register}


@pytest.mark.parametrize("policy", ["vegas", "vegas-lookahead"])
def test_greedy_output_is_that_of_plain_vllm(model: str, plain: list[list[int]], policy: str) -> None:
    with engine(model, {"policy": policy, **FEW}) as llm:
        assert generate(llm, TEXTS) == plain
        verifications, drafts, kept = accepted(llm)
        assert drafts == GAMMA * verifications and 0 < kept < drafts
        assert kept + verifications >= sum(len(tokens) - 1 for tokens in plain)
        (by_place,) = (m.values for m in llm.get_metrics() if m.name == PER_PLACE)
        assert len(by_place) == GAMMA and sum(by_place) == kept
        assert sorted(by_place, reverse=True) == by_place  # a draft counts if those before it do
        again = generate(llm, TEXTS)
        assert again == plain
        assert metric(llm, "prefix_cache_hits") > sum(map(len, TEXTS)) / 2


@pytest.mark.parametrize("fallback", [False, True])
def test_chunked_prompts_prefixes_and_preemption(model: str, plain: list[list[int]], fallback: bool) -> None:
    changes: dict[str, Any] = dict(TIGHT)
    if fallback:
        changes["speculative_config"] = {
            "method": "custom_class", "model": plugin.CUSTOM_CLASS, "num_speculative_tokens": GAMMA
        }  # fmt: skip
        changes["scheduler_cls"] = plugin.CUSTOM_SCHEDULER
    with engine(model, FEW, **changes) as llm:
        assert generate(llm, TEXTS) == plain
        assert metric(llm, "num_preemptions") > 0
        assert metric(llm, "prefix_cache_hits") > 0
        _, drafts, kept = accepted(llm)
        assert 0 < kept < drafts


def test_steps_are_scheduled_ahead(
    model: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last one's tokens are known, as on GPUs: on CPUs vLLM would switch that off."""
    update = CpuPlatform.check_and_update_config.__func__

    def keep(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
    with engine(model, FEW, async_scheduling=False, **TIGHT) as llm:
        assert type(llm.llm_engine.engine_core.engine_core.scheduler) is Scheduler
    with engine(model, FEW, **TIGHT) as llm:
        assert type(llm.llm_engine.engine_core.engine_core.scheduler) is AsyncScheduler
        assert generate(llm, TEXTS) == plain
        assert metric(llm, "num_preemptions") > 0
        _, drafts, kept = accepted(llm)
        assert 0 < kept < drafts


class Waiting(Executor):
    """One that waits for every step."""


@pytest.mark.parametrize(
    ("asked", "method", "unpadded", "executor", "decided"),
    [
        (None, "draft_model", False, "uni", True),
        (False, "draft_model", False, "uni", False),
        (None, "draft_model", True, "uni", None),
        (None, "draft_model", False, Waiting, None),
        (None, "custom_class", False, "uni", None),
    ],
)
def test_scheduling_ahead_is_decided_where_nobody_asked(
    asked: bool | None, method: str, unpadded: bool, executor: Any, decided: bool | None
) -> None:
    """Beside the one installed here vLLM decides so itself, beside older ones it does not."""
    scheduler = SimpleNamespace(async_scheduling=asked)
    config = SimpleNamespace(
        scheduler_config=scheduler,
        speculative_config=SimpleNamespace(method=method, disable_padded_drafter_batch=unpadded),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
    )
    plugin.schedule_ahead(config)
    assert scheduler.async_scheduling is decided


def test_drafts_stop_at_the_batch_size_that_vllm_is_told(model: str, plain: list[list[int]]) -> None:
    speculation = {
        "method": "draft_model", "model": model, "num_speculative_tokens": GAMMA,
        "num_speculative_tokens_per_batch_size": [(1, 2, 2), (3, 4, 0)],
    }  # fmt: skip
    with engine(model, FEW, speculative_config=speculation) as llm:
        assert generate(llm, TEXTS) == plain
        verifications, drafts, kept = accepted(llm)
        # The last of the texts alone is drafted for.
        assert 0 < kept < drafts == 2 * verifications
        generate(llm, TEXTS[:4], max_tokens=30)
        assert accepted(llm) == (verifications, drafts, kept)


def test_drafts_that_see_everything_are_all_accepted(model: str, plain: list[list[int]]) -> None:
    # Sampled ones too, by their true probabilities.
    speculation = {
        "method": "draft_model", "model": model, "num_speculative_tokens": GAMMA,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    with engine(model, {"ratio": 1.0}, speculative_config=speculation) as llm:
        assert generate(llm, TEXTS) == plain
        _, drafts, kept = accepted(llm)
        assert kept == drafts
        generate(llm, TEXTS, temperature=1.0)
        _, more_drafts, more_kept = accepted(llm)
        # Rounding, between a draft's probability and the target's, rejects one of very many.
        assert more_drafts - drafts - (more_kept - kept) <= 2


def test_sampled_output_has_the_distribution_of_plain_vllm(model: str) -> None:
    """Of the third token after a prompt, with probable drafts of which a part is rejected."""
    text, count, length = prompts(400, seed=5), 3000, 3
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_tokens": length}

    def third_tokens(llm: LLM) -> Tensor:
        return torch.tensor([tokens[-1] for tokens in generate(llm, text * count, **sampling)])

    size = {"max_num_seqs": 128}
    with engine(model, **size) as llm:
        expected = third_tokens(llm).bincount(minlength=320)
    speculation = {
        "method": "draft_model", "model": model, "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    with engine(model, FEW, speculative_config=speculation, **size) as llm:
        counts = third_tokens(llm).bincount(minlength=320)
        _, drafts, kept = accepted(llm)
    assert 0.05 * drafts < kept < 0.95 * drafts
    assert p_value_of_two(counts, expected) > 1e-4


def p_value_of_two(a: Tensor, b: Tensor) -> float:
    """Chi-square of homogeneity of two samples of equal size; rare cells are pooled."""
    common = (a + b) >= 20
    table = torch.stack([torch.cat([x[common], x[~common].sum()[None]]) for x in (a, b)]).double()
    mean = table.mean(0)
    # The sum over both rows is twice that of one, as its deviations from the mean are equal.
    return p_value(mean + (table[0] - mean) * 2**0.5, mean)


def test_logprobs_are_those_of_plain_vllm(model: str) -> None:
    def logprobs(llm: LLM) -> list[Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=2
        )
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in TEXTS[:4]], sampling, use_tqdm=False
        )
        return [
            [
                {token: entry.logprob for token, entry in row.items()}
                for row in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            ]
            for output in outputs
        ]

    with engine(model) as llm:
        expected = logprobs(llm)
    with engine(model, FEW) as llm:
        found = logprobs(llm)
    for ours, theirs in zip(found, expected, strict=True):
        for row, other in zip(ours, theirs, strict=True):
            for token in row.keys() & other.keys():
                assert row[token] == pytest.approx(other[token], abs=1e-3)
            assert row.keys() & other.keys()


WISHES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.9, "frequency_penalty": 0.3},
    "an end": {"min_tokens": 20, "stop": ["return", "self."]},
    "words": {"bad_words": ["self"], "allowed_token_ids": list(range(5, 3000))},
    "a grammar": {
        "structured_outputs": StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
                "required": ["name", "n"],
            }
        )
    },
}


def test_what_requests_ask_for_beside_tokens() -> None:
    """Constraints that change from token to token bind inside an accepted block, too."""
    source = Path(tarfile.__file__).read_text()
    texts = [source[:6000], source[3000:8000], "def add(a, b):\n"]
    size = {"max_model_len": 4096, "max_num_seqs": 3, "skip_tokenizer_init": False}

    def answers(llm: LLM) -> dict[str, list[Any]]:
        found = {}
        for name, wish in WISHES.items():
            asked = SamplingParams(temperature=0, max_tokens=60, **wish)
            outputs = [output.outputs[0] for output in llm.generate(texts, asked, use_tqdm=False)]
            found[name] = [(list(x.token_ids), x.finish_reason, x.text) for x in outputs]
        return found

    with engine(str(DEMO_MODEL), **size) as llm:
        expected = answers(llm)
    assert {reason for _, reason, _ in expected["an end"]} >= {"stop"}
    with engine(str(DEMO_MODEL), {"min_tokens": 64}, **size) as llm:
        assert answers(llm) == expected
        _, drafts, kept = accepted(llm)
        assert 0 < kept < drafts


REAL = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": 3}


@pytest.fixture(scope="module")
def real() -> tuple[list[list[int]], list[list[int]]]:
    """Real texts, and how the packaged model goes on without speculation."""
    source = Path(tarfile.__file__).read_text()
    ids = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(source).ids
    texts = [ids[:3000], ids[:1500], ids[1000:2500]]
    with engine(str(DEMO_MODEL), **REAL) as llm:
        return texts, generate(llm, texts)


def test_real_text_with_the_packaged_model(real: tuple[list[list[int]], list[list[int]]]) -> None:
    texts, expected = real
    with engine(str(DEMO_MODEL), {"policy": "vegas-lookahead", "min_tokens": 64}, **REAL) as llm:
        assert generate(llm, texts) == expected
        _, drafts, kept = accepted(llm)
        # The text goes on as it began, and the policy follows it.
        assert kept > 0.6 * drafts


def test_a_server_drafts_and_counts(real: tuple[list[list[int]], list[list[int]]], tmp_path: Path) -> None:
    """`vllm serve`, whose engine is a process of its own; by its module, because the command of this
    build of vLLM asks for a package called vllm."""
    texts, expected = real
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculation = {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": GAMMA}
    options = {
        "model": DEMO_MODEL, "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 4096,
        "speculative-config": json.dumps(speculation),
        "additional-config": json.dumps({"vegas_ops": {"min_tokens": 64}}),
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    environment = {name: v for name, v in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def get(path: str, body: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    try:
        end = time.monotonic() + 200
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            try:
                get("/health")
                break
            except OSError:
                time.sleep(0.2)
        body = {"model": str(DEMO_MODEL), "prompt": texts[1], "max_tokens": 100, "temperature": 0}
        answer = json.loads(get("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True}))
        metrics = get("/metrics")
    finally:
        server.terminate()
        server.wait(60)
    assert answer["choices"][0]["token_ids"] == expected[1]
    drafts, kept = (
        float(re.findall(rf"^vllm:spec_decode_num_{name}_tokens_total\{{.*\}} (\S+)$", metrics, re.M)[0])
        for name in ("draft", "accepted")
    )
    assert 0.3 * drafts < kept <= drafts


def test_without_its_key_draft_models_are_as_before(model: str, plain: list[list[int]]) -> None:
    with engine(model, {}, additional_config={}) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert type(runner.drafter) is DraftModelProposer
        assert generate(llm, TEXTS) == plain
    with engine(model, {}) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert type(runner.drafter) is SelfDraftProposer


@pytest.mark.parametrize(
    ("sync", "policy"), [("local", "vegas"), ("allreduce", "vegas"), ("allreduce", "vegas-lookahead")]
)
def test_tensor_parallelism(
    model: str, plain: list[list[int]], sync: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": policy, **FEW}
    with engine(model, options) as llm:
        generate(llm, TEXTS)
        alone = accepted(llm)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(model, {"selection_sync": sync, **options}, tensor_parallel_size=2) as llm:
        assert generate(llm, TEXTS) == plain
        statistics = accepted(llm)
    # Ranks that select by their own heads draft otherwise.
    assert (statistics == alone) == (sync == "allreduce")


DRAFTS = {"method": "draft_model", "num_speculative_tokens": GAMMA}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "`pipeline_parallel_size` must be 1, got 2"),
        ({"kv_cache_dtype": "fp8"}, "`kv_cache_dtype` must be 'auto', got 'fp8'"),
        ({"speculative_config": None}, "`speculative_config` must be given, got None"),
        ({"additional_config": {"vegas_ops": {"gamma": 4}}}, "must have no keys but"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
            "must have the method 'draft_model'",
        ),
        (
            {"speculative_config": {**DRAFTS, "disable_padded_drafter_batch": True}},
            "`disable_padded_drafter_batch` of `speculative_config` must be off",
        ),
        ({"additional_config": {"vegas_ops": {"policy": "x"}}}, "`policy` must be one of"),
    ],
)
def test_configurations_are_refused_at_start(model: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "model": model, "dtype": "float32", "max_model_len": 1024, "additional_config": {"vegas_ops": {}},
        "speculative_config": DRAFTS,
        **changes,
    }  # fmt: skip
    if arguments["speculative_config"] is not None:
        arguments["speculative_config"] = {"model": model, **arguments["speculative_config"]}
    with pytest.raises(Exception, match=message):
        EngineArgs(**arguments).create_engine_config()


def test_models_with_other_attention_are_refused(model: str, tmp_path: Path) -> None:
    config = Qwen3Config.from_pretrained(model)
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 64, 0
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with (
        pytest.raises(Exception, match="plain causal attention in every layer, got a sliding window"),
        engine(str(tmp_path), {}),
    ):
        pass


def test_what_is_refused_by_its_name_is_called_so_in_vllm(model: str) -> None:
    """A check of an attribute that vLLM no longer has would pass whatever is served."""
    arguments: dict[str, Any] = {"model": model, "dtype": "float32", "max_model_len": 1024}
    speculation = {"method": "draft_model", "model": model, "num_speculative_tokens": GAMMA}
    made = EngineArgs(**arguments, speculative_config=speculation).create_engine_config()
    for part, names in (
        (made.model_config, ("use_mla", "is_encoder_decoder", "is_attention_free", "is_hybrid")),
        (made.model_config, ("is_multimodal_model",)),
        (made.parallel_config, ("decode_context_parallel_size", "prefill_context_parallel_size")),
        (made.parallel_config, ("pipeline_parallel_size", "enable_eplb", "enable_dbo")),
        (made.speculative_config, ("disable_padded_drafter_batch", "parallel_drafting")),
        (made.speculative_config, ("use_heterogeneous_vocab",)),
        (made, ("use_v2_model_runner", "lora_config", "kv_transfer_config")),
    ):
        assert [name for name in names if not hasattr(part, name)] == []


PLAIN = {
    "num_heads": 8, "num_kv_heads": 2, "head_size": 64, "scale": 0.125, "sliding_window": None,
    "alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "kv_sharing_target_layer_name": None,
    "attn_type": "decoder",
}  # fmt: skip


def layer_with(kind: type = GuidedCPUImpl, **changes: Any) -> Any:
    """An attention layer as the plugin sees it."""
    impl = object.__new__(kind)
    for name, value in {**PLAIN, **changes}.items():
        setattr(impl, name, value)
    backend = SimpleNamespace(get_name=lambda: "FLEX_ATTENTION")
    return SimpleNamespace(impl=impl, kv_cache_torch_dtype=torch.float32, get_attn_backend=lambda: backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": (63, 0)}, "got a sliding window in last"),
        ({"alibi_slopes": torch.ones(8)}, "got ALiBi slopes in last"),
        ({"logits_soft_cap": 30.0}, "got softcap in last"),
        ({"sinks": torch.ones(8)}, "got attention sinks in last"),
        ({"kv_sharing_target_layer_name": "first"}, "got another layer's cache in last"),
        ({"attn_type": "encoder_only"}, "got attention other than a decoder's in last"),
        ({"num_kv_heads": 4}, "the same heads, scale and dtype in every layer, got .* in last"),
        ({"kind": CPUAttentionBackendImpl}, "must be one of CPU_ATTN, .* got FLEX_ATTENTION in last; set"),
        (None, "must have attention layers with a cache, got none"),
    ],
)
def test_layers_of_other_kinds_are_refused(
    change: dict[str, Any] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {} if change is None else {"first": layer_with(), "last": layer_with(**change)}
    monkeypatch.setattr(vllm_attention, "check_config", lambda vllm_config: Options())
    monkeypatch.setattr(vllm_attention, "attention_layers", lambda vllm_config: layers)
    with pytest.raises(ValueError, match=message):
        vllm_attention.attach(None, torch.device("cpu"))


def test_a_quantised_output_is_refused() -> None:
    impl = layer_with(guidance=object()).impl
    q = torch.zeros(1, 512)
    with pytest.raises(ValueError, match="attention must not quantise its output"):
        impl.forward(None, q, q, q, q, vllm_attention.DraftMetadata(1, q, q), q, output_scale=torch.ones(1))


def test_the_benchmark_measures_and_compares(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "vllm_serving.py"
    options = "--contexts 300 --batches 2 --temperatures 0 0.7 --new-tokens 8 --repeats 1 --policies vegas"
    command = [sys.executable, str(script), *options.split(), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--vllm", json.dumps({"enforce_eager": True})], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("*/vllm-quick.jsonl")
    head, plain, sampled, vegas, ours = (json.loads(line) for line in path.read_text().splitlines())
    assert head["vllm"] and plain["case"]["policy"] == "plain" and "drafted" not in plain
    assert vegas["differences"] == [] and "differences" not in ours
    assert [sampled["case"]["temperature"], ours["case"]["temperature"]] == [0.7, 0.7]
    assert 0 < vegas["accepted"] <= vegas["drafted"] <= vegas["verifications"] * vegas["case"]["gamma"]
    assert vegas["steps"] < plain["steps"] == 7
    assert vegas["pays_above"] == round(vegas["step_ms"] / plain["step_ms"], 2)
