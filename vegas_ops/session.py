"""A model, its tokenizer and a paged cache: what the command line needs to continue a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from vegas_ops.models import Qwen3Model, Tokenizer
from vegas_ops.speculative import PagedKVCache, Request, SpeculativeDecoder

DEMO_MODEL = Path(__file__).parent / "data" / "qwen3-6m-longctx"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAGE_SIZE = 64  # tokens
PREFILL_CHUNK, GPU_PREFILL_CHUNK = 1024, 8192  # tokens

OnText = Callable[[str], None]


@dataclass
class Run:
    """What continuing one text took."""

    request: Request
    seconds: float  # of decoding alone: from the first token on, showing text left out
    # (layers[, num_heads_kv], width) token indices that each round of drafts attended to
    selections: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        tokens = len(self.request.output) - 1
        return tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of K and V that attention read for one token."""
        statistics = self.request.statistics
        read = statistics.draft_bytes + statistics.verify_bytes
        return read / statistics.tokens if statistics.tokens else 0.0


class Session:
    """A loaded model folder; `run` continues texts, one after the other.

    dtype: None is fp32 on the CPU, where greedy output is asserted to be plain decoding's, and the
    checkpoint's elsewhere. Raises ModelFolderError for a folder that is not a model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if dtype is None and torch.device(device).type == "cpu":
            dtype = torch.float32
        self.folder = folder
        self.batch_invariant = batch_invariant
        self.model = Qwen3Model.from_pretrained(folder, dtype, device, batch_invariant)
        self.tokenizer = Tokenizer(folder)

    def _room(self, max_new_tokens: int) -> int:
        """Tokens that a prompt may have, so that the output fits; at least one."""
        most = self.model.max_position - 1
        if max_new_tokens > most:
            raise ValueError(
                f"`max_new_tokens` must be at most {most}, so that a prompt fits into the model's context, "
                f"got {max_new_tokens}"
            )
        return most + 1 - max_new_tokens

    def context(self, asked: int | None, default: int, max_new_tokens: int) -> int:
        """Tokens of a prompt to keep: as many as asked for, or ValueError where they leave no room
        for the output; None: the default, or what there is room for."""
        room = self._room(max_new_tokens)
        if asked is not None and asked > room:
            raise ValueError(
                f"`context` must be at most {room}, so that `max_new_tokens` ({max_new_tokens}) more fit "
                f"into the model's context, got {asked}"
            )
        return min(default, room) if asked is None else asked

    def encode(self, text: str, max_new_tokens: int, keep: int | None = None) -> list[int]:
        """Token ids of the last `keep` tokens; ValueError where they leave no room for the output."""
        ids = self.tokenizer.encode(text)
        if keep is not None:
            ids = ids[-keep:] if keep > 0 else []
        if not ids:
            raise ValueError("`prompt` must hold text, got none")
        limit = self._room(max_new_tokens)
        if len(ids) > limit:
            raise ValueError(
                f"`prompt` must have at most {limit} tokens, so that `max_new_tokens` ({max_new_tokens}) "
                f"more fit into the model's context, got {len(ids)}"
            )
        return ids

    def decoder(self, max_tokens: int, read_every: int = 1) -> SpeculativeDecoder:
        """A decoder whose cache holds `max_tokens` tokens: prompts, outputs and drafts in all.
        read_every: as of `SpeculativeDecoder`."""
        model = self.model
        cache = PagedKVCache(
            num_layers=model.num_layers,
            num_pages=-(-max_tokens // PAGE_SIZE),
            page_size=PAGE_SIZE,
            num_heads_kv=model.num_heads_kv,
            head_dim=model.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        chunk = PREFILL_CHUNK if model.device.type == "cpu" else GPU_PREFILL_CHUNK
        return SpeculativeDecoder(
            model,
            cache,
            prefill_chunk=chunk,
            batch_invariant=self.batch_invariant,
            read_every=read_every,
        )

    def run(self, decoder: SpeculativeDecoder, request: Request, on_text: OnText | None = None) -> Run:
        """Decodes one request to its end; ValueError where the model's logits are not finite."""
        push = self.tokenizer.stream()
        decoder.add(request)
        seconds = 0.0
        selections: list[torch.Tensor] = []
        while not request.finished:
            if request.gamma and request.selection is not None:
                selections.append(request.selection.indices.clone())
            before = len(request.output)
            start = perf_counter()
            decoder.step()
            if before:
                seconds += perf_counter() - start
            new = request.output[before:]
            if on_text is not None and new:
                on_text(push(new))
        if request.finish_reason == "error":
            raise ValueError(f"decoding failed: {request.error}")
        return Run(request, seconds, selections)


def printable(text: str) -> str:
    """The text without control characters: a model may emit escape sequences of terminals."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def read_text(path: Path) -> str:
    """A UTF-8 file, or ValueError with its name."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"`prompt` must be a readable file: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"`prompt` must be UTF-8 text: {path}: {error}") from None


def common_prefix(ids: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(ids, other, strict=False)):
        if a != b:
            return i
    return min(len(ids), len(other))
