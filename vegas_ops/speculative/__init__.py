"""Verification-guided self-speculative decoding: the loop, its cache, its policies, acceptance."""

from vegas_ops.speculative.acceptance import Accepted, accept_greedy, accept_sampled
from vegas_ops.speculative.kv_cache import CacheSequence, OutOfPages, PagedKVCache
from vegas_ops.speculative.loop import SpeculativeDecoder
from vegas_ops.speculative.model import Attend, LayerAttention, Model
from vegas_ops.speculative.policies import (
    POLICIES,
    VEGAS,
    VEGAS_LOOKAHEAD,
    Full,
    Policy,
    Random,
    Selection,
    Streaming,
    TopkOracle,
    Vegas,
)
from vegas_ops.speculative.request import Request, Statistics
from vegas_ops.speculative.sampling import RepetitionPenalty, SamplingParams

__all__ = [
    "POLICIES",
    "VEGAS",
    "VEGAS_LOOKAHEAD",
    "Accepted",
    "Attend",
    "CacheSequence",
    "Full",
    "LayerAttention",
    "Model",
    "OutOfPages",
    "PagedKVCache",
    "Policy",
    "Random",
    "RepetitionPenalty",
    "Request",
    "SamplingParams",
    "Selection",
    "SpeculativeDecoder",
    "Statistics",
    "Streaming",
    "TopkOracle",
    "Vegas",
    "accept_greedy",
    "accept_sampled",
]
