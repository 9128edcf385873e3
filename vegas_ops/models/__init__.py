"""Small model runners, so that the driver runs real weights without an engine."""

from vegas_ops.models.config import ModelFolderError, Qwen3Config, RopeScaling
from vegas_ops.models.qwen3 import Qwen3Model
from vegas_ops.models.tokenizer import Tokenizer

__all__ = ["ModelFolderError", "Qwen3Config", "Qwen3Model", "RopeScaling", "Tokenizer"]
