"""Verification-guided self-speculative decoding: the loop, its cache, its policies, acceptance."""

from vegas_ops.speculative.acceptance import Accepted, accept_greedy, accept_sampled
from vegas_ops.speculative.baselines import (
    Full,
    Pillar,
    Quest,
    Random,
    SnapKV,
    SpecExtend,
    Streaming,
    TopkOracle,
)
from vegas_ops.speculative.kv_cache import CacheSequence, OutOfPages, PagedKVCache
from vegas_ops.speculative.loop import SpeculativeDecoder
from vegas_ops.speculative.model import Attend, LayerAttention, Model
from vegas_ops.speculative.policies import POLICIES, VEGAS, VEGAS_LOOKAHEAD, Vegas
from vegas_ops.speculative.request import Request, Statistics
from vegas_ops.speculative.sampling import RepetitionPenalty, SamplingParams
from vegas_ops.speculative.selection import Policy, Selection
from vegas_ops.speculative.tuning import Trial, Tuning, tune

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
    "Pillar",
    "Policy",
    "Quest",
    "Random",
    "RepetitionPenalty",
    "Request",
    "SamplingParams",
    "Selection",
    "SnapKV",
    "SpecExtend",
    "SpeculativeDecoder",
    "Statistics",
    "Streaming",
    "TopkOracle",
    "Trial",
    "Tuning",
    "Vegas",
    "accept_greedy",
    "accept_sampled",
    "tune",
]
