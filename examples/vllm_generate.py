"""Self-speculation in vLLM: the same requests without and with it, and what vLLM counted.

Needs vLLM and vegas_ops in one environment; vLLM finds the plugin by itself. `vllm serve` takes the
same settings: see docs/integrating.md. Any model that the plugin serves may be given instead of the
packaged demo model.
"""

import argparse
import os
import random
import sys
import time

# vLLM's engine in this process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from vllm import LLM, SamplingParams

from vegas_ops.session import DEMO_MODEL

model = sys.argv[1] if len(sys.argv) > 1 else str(DEMO_MODEL)
sources = []
for module in (argparse, random):
    with open(module.__file__) as file:
        sources.append(file.read()[:12_000])
greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
settings = {
    "model": model,
    "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
    "max_model_len": 8192,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.4,
    "disable_log_stats": False,
}
speculation = {
    "speculative_config": {
        "method": "draft_model",
        "model": model,  # the target itself
        "num_speculative_tokens": 6,
        "draft_sample_method": "probabilistic",
    },
    "additional_config": {"vegas_ops": {"policy": "vegas-lookahead", "ratio": 0.07, "min_tokens": 256}},
}
texts = []
for name, changes in (("plain", {}), ("vegas", speculation)):
    llm = LLM(**settings, **changes)
    llm.generate(sources, SamplingParams(max_tokens=1), use_tqdm=False)  # the prompts, kept as prefixes
    start = time.perf_counter()
    outputs = llm.generate(sources, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    texts.append([output.outputs[0].text for output in outputs])
    print(f"{name}: {seconds:.2f} s")
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    if changes:
        drafts = counts["vllm:spec_decode_num_draft_tokens"]
        print(f"{counts['vllm:spec_decode_num_accepted_tokens']} of {drafts} drafts accepted")
    llm.llm_engine.engine_core.shutdown()
    del llm
print(f"identical: {texts[0] == texts[1]}")
