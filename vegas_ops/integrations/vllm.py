"""Self-speculation for vLLM: a plugin that vLLM finds by itself once vegas_ops is installed.

    vllm serve MODEL --additional-config '{"vegas_ops": {}}' --speculative-config
        '{"method": "draft_model", "model": MODEL, "num_speculative_tokens": 6,
          "draft_sample_method": "probabilistic"}'

vLLM's own draft-model machinery drafts, verifies and accepts; the plugin hands it the target itself as
the draft model, with attention that dumps logits in verifications and reads the selected tokens in
drafts. Without "vegas_ops" in the additional config, vLLM is as it was.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from packaging.version import Version

from vegas_ops.integrations.vllm_guidance import Options

KEY = "vegas_ops"
CUSTOM_CLASS = "vegas_ops.integrations.vllm_custom_class.CustomClassProposer"
CUSTOM_SCHEDULER = "vegas_ops.integrations.vllm_custom_class.LookaheadScheduler"
# Minor releases change the internals that the plugin stands on: what it was read and run with.
VERSIONS = {"cuda": (Version("0.24"), Version("0.27")), "cpu": (Version("0.24"), Version("0.33"))}


def options_of(vllm_config: Any) -> Options | None:
    """What the additional config asks for; None where it does not name vegas_ops."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or KEY not in additional:
        return None
    values = additional[KEY]
    known = [field.name for field in dataclasses.fields(Options)]
    if not isinstance(values, dict):
        raise TypeError(f"`additional_config[{KEY!r}]` must be a dict, got {values!r}")
    for name in values:
        if name not in known:
            raise ValueError(
                f"`additional_config[{KEY!r}]` must have no keys but {', '.join(known)}, got {name!r}"
            )
    return Options(**values)


def check_version(version: str, device_type: str) -> None:
    if device_type not in VERSIONS:
        raise ValueError(f"vegas_ops: vLLM must run on {' or '.join(VERSIONS)}, got {device_type!r}")
    least, below = VERSIONS[device_type]
    if not least <= Version(version) < below:
        raise ValueError(
            f"vegas_ops: vLLM on {device_type} must be at least {least} and below {below}, got {version}; "
            f"`pip install 'vllm>={least},<{below}'`, or leave {KEY!r} out of `additional_config`"
        )


def check_config(vllm_config: Any) -> Options:
    """Refuses what self-speculation does not serve; ValueError names it and what to do."""
    options = options_of(vllm_config)
    assert options is not None
    _check_speculation(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"
    ):  # fmt: skip
        if getattr(parallel, name, 1) != 1:
            raise ValueError(
                f"vegas_ops: `{name}` must be 1, got {getattr(parallel, name)}: every rank must hold all "
                "layers and all tokens of its heads; use `tensor_parallel_size`"
            )
    for name in ("enable_eplb", "enable_dbo"):
        if getattr(parallel, name, False):
            raise ValueError(f"vegas_ops: `{name}` must be off, got True: drafts run outside of it")
    for name, what in (
        ("use_mla", "latent attention (MLA), which caches no keys per head"),
        ("is_encoder_decoder", "an encoder"),
        ("is_attention_free", "no attention"),
        ("is_hybrid", "layers with a recurrent state, which drafts would overwrite"),
        ("is_multimodal_model", "inputs other than text"),
    ):
        if getattr(model, name, False):
            raise ValueError(
                f"vegas_ops: `model` must be a decoder with plain attention, got {model.model} with {what}; "
                f"serve it without {KEY!r} in `additional_config`"
            )
    if vllm_config.lora_config is not None:
        raise ValueError("vegas_ops: `enable_lora` must be off, got True: merge the adapter into the weights")
    if vllm_config.kv_transfer_config is not None:
        raise ValueError("vegas_ops: `kv_transfer_config` must be None: drafts write into the cache")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ValueError(f"vegas_ops: `kv_cache_dtype` must be 'auto', got {cache_dtype!r}")
    return options


def _check_speculation(vllm_config: Any) -> None:
    speculation = vllm_config.speculative_config
    if speculation is None:
        raise ValueError(
            "vegas_ops: `speculative_config` must be given, got None; use "
            '{"method": "draft_model", "model": MODEL, "num_speculative_tokens": 6}'
        )
    if speculation.method == "custom_class" and speculation.model == CUSTOM_CLASS:
        scheduler = vllm_config.scheduler_config.scheduler_cls
        if scheduler != CUSTOM_SCHEDULER:
            raise ValueError(
                f"vegas_ops: `scheduler_cls` must be {CUSTOM_SCHEDULER!r}, got {scheduler!r}: drafts write "
                "to slots that vLLM's own does not reserve"
            )
        return
    target = vllm_config.model_config.model
    if speculation.target_model_config is not None:
        target = speculation.target_model_config.model
    if speculation.method != "draft_model" or speculation.model != target:
        raise ValueError(
            "vegas_ops: `speculative_config` must have the method 'draft_model' and the target "
            f"{target!r} as its model, got {speculation.method!r} and {speculation.model!r}"
        )
    for name in ("disable_padded_drafter_batch", "parallel_drafting", "use_heterogeneous_vocab"):
        if getattr(speculation, name, False):
            raise ValueError(f"vegas_ops: `{name}` of `speculative_config` must be off, got True")


def check_runner(vllm_config: Any, device_type: str) -> None:
    """The plugin stands on vLLM's first model runner, which serves draft models by default."""
    if device_type != "cpu" and getattr(vllm_config, "use_v2_model_runner", False):
        raise ValueError(
            "vegas_ops: vLLM must use its first model runner, got the second; "
            "unset VLLM_USE_V2_MODEL_RUNNER, or set it to 0"
        )


def check_dtype(vllm_config: Any, device_type: str) -> None:
    dtype = vllm_config.model_config.dtype
    if device_type != "cpu" and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"vegas_ops: `dtype` must be bfloat16 or float16 on GPUs, got {dtype}; set `--dtype bfloat16`"
        )


def check_installed() -> str:
    """Refuses a vLLM that the plugin was not made for; the type of the device that it runs on."""
    import vllm
    from vllm.platforms import current_platform

    check_version(vllm.__version__, current_platform.device_type)
    return current_platform.device_type


def check(vllm_config: Any, device_type: str) -> None:
    """Refuses what a complete configuration that names vegas_ops may not ask for on such a device."""
    check_config(vllm_config)
    check_runner(vllm_config, device_type)
    check_dtype(vllm_config, device_type)


def schedule_ahead(vllm_config: Any) -> None:
    """Has vLLM prepare a step while the last one runs, unless the user has decided: beside draft models
    it can, but up to 0.26 does not of itself, and the host's time is added to every round's."""
    from vllm.v1.executor.abstract import Executor

    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    if (
        scheduler.async_scheduling is None
        and getattr(speculation, "method", None) == "draft_model"
        and not speculation.disable_padded_drafter_batch
        and Executor.get_class(vllm_config).supports_async_scheduling()
    ):
        scheduler.async_scheduling = True


def register() -> None:
    """The entry point: vLLM calls it in each of its processes, maybe more than once.

    Two functions of vLLM are wrapped. A configuration that names vegas_ops is checked where it is
    made, in the front end; and the proposer of the method "draft_model" becomes ours for it.
    """
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    if getattr(VllmConfig, "_vegas_ops", False):
        return
    VllmConfig._vegas_ops = True
    made = VllmConfig.__post_init__

    @functools.wraps(made)
    def checked(self: Any, *arguments: Any) -> None:
        ours = options_of(self) is not None
        if ours:
            device_type = check_installed()  # before vLLM's own checks, whose words are others'
            schedule_ahead(self)
        made(self, *arguments)
        if ours:
            check(self, device_type)

    def new(cls: type, vllm_config: Any, *arguments: Any, **options: Any) -> Any:
        if cls is DraftModelProposer and options_of(vllm_config) is not None:
            from vegas_ops.integrations.vllm_proposer import SelfDraftProposer

            cls = SelfDraftProposer
        return object.__new__(cls)

    VllmConfig.__post_init__ = checked
    DraftModelProposer.__new__ = new
