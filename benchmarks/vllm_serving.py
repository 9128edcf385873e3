"""vLLM without and with the plugin, offline, in one process: tokens per second, acceptance, equal text.

Needs vLLM and vegas_ops in one environment. Prompts are read before, and stay in vLLM's prefix cache.
Time counts from the first token of a batch to its last, by the engine's own clock: taking long prompts in
again may cost vLLM's host more than decoding, and differs from run to run. The metrics are vLLM's own. A
text that differs from plain vLLM's is listed with the gap, in log-probability, that plain vLLM saw between
its own token and the other one; sampled texts (--temperatures) are not compared. A batch takes as many
steps as its slowest text. What a step costs, in steps of plain vLLM, is the tokens per verification ("Mean
acceptance length" in vLLM's log) above which drafts pay. With --random-weights a large model's shape is
timed: its outputs mean nothing, and its acceptance is vLLM's synthetic one, at the paper's figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

# vLLM's engine in this process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from loop_workload import PAPER_GAMMA, PAPER_TOKENS, SHAPES, cut_prompts
from report import ROOT, ResultFile, device_name, environment, slug
from rich.console import Console
from rich.table import Table

from vegas_ops.demo import standard_library_text
from vegas_ops.integrations.vllm_guidance import POLICIES, SYNCS
from vegas_ops.models.tokenizer import Tokenizer
from vegas_ops.session import DEMO_MODEL, read_text

Output = tuple[list[int], Any, Any]  # token ids; log-probabilities, where asked for; the request's clock

_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_TOP = 5  # log-probabilities per token of plain vLLM


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="vegas-ops bench vllm", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", type=Path, default=DEMO_MODEL, help="Hugging Face folder")
    p.add_argument(
        "--random-weights", choices=tuple(SHAPES), help="a shape instead of a model, acceptance synthetic"
    )
    p.add_argument("--texts", type=Path, help="folder of .txt files (default: Python's own library sources)")
    p.add_argument("--contexts", nargs="+", type=int, default=[8000], help="tokens of a prompt")
    p.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="requests at once")
    p.add_argument("--temperatures", nargs="+", type=float, default=[0.0], help="0 decodes greedily")
    p.add_argument("--new-tokens", type=int, default=256, help="of every request (default: %(default)s)")
    p.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    p.add_argument("--gamma", type=int, default=PAPER_GAMMA, help="drafts a round (default: %(default)s)")
    p.add_argument(
        "--ratio", type=float, default=0.07, help="of the cache drafts read (default: %(default)s)"
    )
    p.add_argument("--selection-sync", choices=SYNCS, default=SYNCS[0], help="with tensor parallelism")
    p.add_argument("--repeats", type=int, default=3, help="timed runs, of which the fastest counts")
    p.add_argument("--vllm", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--record", action="store_true", help="write vllm.jsonl, the record that is kept")
    arguments = p.parse_args(argv)
    for name, value, least in (
        *(("--contexts", context, 1) for context in arguments.contexts),
        *(("--batches", batch, 1) for batch in arguments.batches),
        *(("--temperatures", temperature, 0) for temperature in arguments.temperatures),
        ("--new-tokens", arguments.new_tokens, 2),
        ("--gamma", arguments.gamma, 1),
        ("--repeats", arguments.repeats, 1),
    ):
        if value < least:
            p.error(f"{name} must be at least {least}, got {value}")
    if arguments.texts and not list(arguments.texts.glob("*.txt")):
        p.error(f"--texts must be a folder that holds .txt files, got {arguments.texts}")
    return arguments


def shape_folder(name: str, context: int) -> str:
    """A model folder of a shape: its config alone, for vLLM's `load_format="dummy"`."""
    s = SHAPES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
        "vocab_size": s.vocab_size, "hidden_size": s.hidden_size, "intermediate_size": s.intermediate_size,
        "num_hidden_layers": s.num_layers, "num_attention_heads": s.num_heads_q,
        "num_key_value_heads": s.num_heads_kv, "head_dim": s.head_dim, "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta, "tie_word_embeddings": s.tie_word_embeddings,
        "max_position_embeddings": max(context, s.max_position), "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def settings(arguments: argparse.Namespace, model: str, policy: str | None) -> dict[str, Any]:
    """Arguments of vllm.LLM; policy None: plain vLLM."""
    given: dict[str, Any] = {
        "model": model, "dtype": "bfloat16" if torch.cuda.is_available() else "float32", "seed": 0,
        "max_model_len": max(arguments.contexts) + arguments.new_tokens + 64, "skip_tokenizer_init": True,
        "max_num_seqs": max(arguments.batches), "disable_log_stats": False,
    }  # fmt: skip
    if arguments.random_weights:
        given["load_format"] = "dummy"
    if policy is not None:
        speculation = {
            "method": "draft_model", "model": model, "num_speculative_tokens": arguments.gamma,
            "draft_sample_method": "probabilistic",
        }  # fmt: skip
        if arguments.random_weights:
            speculation["rejection_sample_method"] = "synthetic"
            speculation["synthetic_acceptance_length"] = PAPER_TOKENS["vegas"]
        given["speculative_config"] = speculation
        options = {"policy": policy, "ratio": arguments.ratio, "selection_sync": arguments.selection_sync}
        given["additional_config"] = {"vegas_ops": options}
    return {**given, **arguments.vllm}


def counts(llm: Any) -> list[int]:
    """Verifications, drafts, accepted drafts so far, as vLLM counts them."""
    values = dict.fromkeys((f"vllm:spec_decode_{name}" for name in _COUNTS), 0)
    for metric in llm.get_metrics():
        if metric.name in values:
            values[metric.name] += int(metric.value)
    return list(values.values())


def generate(
    llm: Any, prompts: list[list[int]], tokens: int, temperature: float = 0.0, logprobs: int | None = None
) -> list[Output]:
    import vllm

    inputs = [vllm.inputs.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    sampling = vllm.SamplingParams(
        temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    requests = llm.generate(inputs, sampling, use_tqdm=False)
    return [(list(r.outputs[0].token_ids), r.outputs[0].logprobs, r.metrics) for r in requests]


def difference(plain: Output, ours: Output) -> tuple[int, float | None] | None:
    """Where a text leaves plain vLLM's, and plain vLLM's gap there; None if it does not."""
    (tokens, logprobs, _), other = plain, ours[0]
    place = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), None)
    if place is None:
        return None
    seen = logprobs[place]
    if other[place] not in seen:
        return place, None
    return place, round(seen[tokens[place]].logprob - seen[other[place]].logprob, 4)


class Steps:
    """When an engine's steps begin and end."""

    def __init__(self, llm: Any) -> None:
        self.times: list[tuple[float, float]] = []
        self._step = llm.llm_engine.step
        llm.llm_engine.step = self

    def __call__(self) -> Any:
        begin = time.monotonic()
        outputs = self._step()
        self.times.append((begin, time.monotonic()))
        return outputs

    def between(self, first: float, last: float) -> int:
        """Steps behind the one that `first` lies in, up to the one of `last`."""
        return sum(end > first and begin < last for begin, end in self.times) - 1


def decode(
    llm: Any, prompts: list[list[int]], tokens: int, repeats: int, temperature: float = 0.0
) -> tuple[float, int, list[Output]]:
    """Seconds and steps of the fastest run, from its first token to its last; the last run's outputs."""
    runs = []
    for _ in range(repeats):
        outputs = generate(llm, prompts, tokens, temperature)
        clocks = [clock for _, _, clock in outputs]
        first, last = min(c.first_token_ts for c in clocks), max(c.last_token_ts for c in clocks)
        runs.append((last - first, llm.llm_engine.step.between(first, last)))
    return *min(runs), outputs


def measure(
    llm: Any, prompts: list[list[int]], temperature: float, arguments: argparse.Namespace, plain: bool
) -> tuple[dict[str, Any], list[Output]]:
    """A record, and the outputs; plain vLLM's greedy ones with log-probabilities."""
    generate(llm, prompts, 1)
    generate(llm, prompts, min(16, arguments.new_tokens), temperature)
    before = counts(llm)
    seconds, steps, outputs = decode(llm, prompts, arguments.new_tokens, arguments.repeats, temperature)
    verifications, drafted, accepted = (b - a for a, b in zip(before, counts(llm), strict=True))
    if plain and not temperature:
        outputs = generate(llm, prompts, arguments.new_tokens, logprobs=_TOP)
    us = 1e6 * seconds / (len(prompts) * (arguments.new_tokens - 1))
    record: dict[str, Any] = {
        "us": round(us, 2), "tokens_per_second": round(1e6 / us, 1), "steps": steps,
        "step_ms": round(1e3 * seconds / max(1, steps), 3),
    }  # fmt: skip
    if verifications:
        record |= {
            "verifications": verifications, "drafted": drafted, "accepted": accepted,
            "tokens_per_verification": round(1 + accepted / verifications, 3),
        }  # fmt: skip
    return record, outputs


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    try:
        import vllm
    except ImportError as error:
        raise ImportError(f"vLLM must be installed in this environment: {error}") from error
    console = Console(highlight=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room = max(arguments.contexts) + arguments.new_tokens + 64
    model = str(arguments.model)
    if arguments.random_weights:
        model = shape_folder(arguments.random_weights, room)
    paths = sorted(arguments.texts.glob("*.txt")) if arguments.texts else []
    text = "\n\n".join(read_text(path) for path in paths) if paths else standard_library_text()
    ids = Tokenizer(arguments.model).encode(text)
    name = arguments.random_weights or Path(arguments.model).name
    path = "vllm.jsonl" if arguments.record else "vllm-quick.jsonl"
    results = ResultFile(arguments.out / slug(device_name(device)) / path)
    results.write({**environment(device), "vllm": vllm.__version__, "model": name, "peers": {}})
    table = Table(
        "context", "batch", "T", "vLLM", "tokens/s", "speed-up", "tokens/round", "pays above", "as plain",
        box=None,
    )  # fmt: skip
    base: dict[tuple[int, int, float], tuple[dict[str, Any], list[Output]]] = {}
    cells = list(product(arguments.contexts, arguments.batches, arguments.temperatures))
    for policy in (None, *arguments.policies):
        llm = vllm.LLM(**settings(arguments, model, policy))
        Steps(llm)
        compilation = llm.llm_engine.vllm_config.compilation_config
        graphs = getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode))
        for cell in cells:
            context, batch, temperature = cell
            prompts = cut_prompts(ids, batch, context)
            record, outputs = measure(llm, prompts, temperature, arguments, policy is None)
            case = {
                "batch": batch, "context": context, "temperature": temperature,
                "policy": policy or "plain",
                "gamma": arguments.gamma if policy else 0, "ratio": arguments.ratio if policy else None,
                "new_tokens": arguments.new_tokens, "graphs": graphs, "vllm": arguments.vllm,
                "acceptance": "synthetic" if arguments.random_weights else "measured",
            }  # fmt: skip
            if policy is None:
                base[cell] = record, outputs
            plain, plain_outputs = base[cell]
            record["speed_up"] = round(plain["us"] / record["us"], 3)
            same, pays_above = "", ""
            if policy is not None:
                record["pays_above"] = round(record["step_ms"] / plain["step_ms"], 2)
                pays_above = f"{record['pays_above']:.2f}"
            if policy is not None and not (temperature or arguments.random_weights):
                found = [difference(*pair) for pair in zip(plain_outputs, outputs, strict=True)]
                record["differences"] = [place for place in found if place is not None]
                same = f"{batch - len(record['differences'])} of {batch}"
            results.write({"op": "vllm", "case": case, **record})
            table.add_row(
                f"{context}", f"{batch}", f"{temperature:g}", case["policy"],
                f"{record['tokens_per_second']:.0f}", f"{record['speed_up']:.2f}x",
                f"{record.get('tokens_per_verification', 1.0):.2f}", pays_above, same,
            )  # fmt: skip
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.close()
    console.print(table)
    console.print(f"results: {results.path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
