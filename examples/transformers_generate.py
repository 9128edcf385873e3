"""Self-speculation for a model of Hugging Face transformers: a batch, a stream, and what it saved.

Needs `pip install '.[transformers]'`. The folder of another
model, with its tokenizer.json, may be given instead of the packaged demo model.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TextStreamer

from vegas_ops.integrations.transformers import generate
from vegas_ops.session import DEMO_MODEL

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO_MODEL
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), padding_side="left")
tokenizer.pad_token = tokenizer.decode(model.config.eos_token_id or 0)

# Two prompts of different lengths. Greedy output is that of the model's own `generate`.
texts = [Path(argparse.__file__).read_text()[:20_000], Path(random.__file__).read_text()[:5_000]]
batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
options = {"max_new_tokens": 64, "do_sample": False}

start = time.perf_counter()
plain = model.generate(**batch, **options)
middle = time.perf_counter()
result = generate(
    model, **batch, **options, return_dict_in_generate=True, gamma=6, policy="vegas-lookahead", ratio=0.07
)
end = time.perf_counter()
print(f"{batch['attention_mask'].sum(1).tolist()} tokens; identical: {torch.equal(result.sequences, plain)}")
print(f"transformers {middle - start:.2f} s, vegas_ops {end - middle:.2f} s, prompts included")
for statistics in result.statistics:
    print(
        f"{statistics.tokens_per_iteration:.2f} tokens per verification, "
        f"{statistics.accepted} of {statistics.drafted} drafts accepted"
    )

# One prompt, sampled, as a stream: `torch.manual_seed` repeats it.
torch.manual_seed(0)
inputs = tokenizer(texts[1], return_tensors="pt", return_token_type_ids=False)
generate(
    model, **inputs, do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=40,
    streamer=TextStreamer(tokenizer, skip_prompt=True),
)  # fmt: skip
