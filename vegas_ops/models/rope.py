"""Rotary position embedding as multiplication of complex numbers."""

from __future__ import annotations

import math

import torch

from vegas_ops.models.config import Qwen3Config


def pair_order(head_dim: int) -> torch.Tensor:
    """Order of head dimensions that puts the two halves of every rotated pair side by side.

    Checkpoints rotate dimension d together with d + head_dim / 2. Attention only sees dot products
    of queries and keys, so both may be stored in any one order; side by side a pair is one complex
    number, and RoPE is one multiplication instead of five operations.
    """
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


def rope_table(config: Qwen3Config, device: torch.device | str = "cpu") -> torch.Tensor:
    """(max_position, head_dim / 2) complex64: the factor of every position and pair.

    With YaRN (arXiv 2309.00071, §3.2-3.4) low frequencies are divided by the factor, high ones
    kept, a linear ramp between; the attention temperature scales the table itself.
    """
    dim, scaling = config.head_dim, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = config.rope_theta**-exponents  # radians per token
    amplitude = 1.0
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "yarn":
        low, high = (
            dim
            * math.log(scaling.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
            for rotations in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
        ramp = ramp.clamp(0, 1)
        frequencies = frequencies * (1 - ramp) + frequencies / scaling.factor * ramp
        amplitude = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    positions = torch.arange(config.max_position, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.full_like(angles, amplitude), angles).to(torch.complex64).to(device)
