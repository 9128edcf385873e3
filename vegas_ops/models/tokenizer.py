"""Text to token ids and back, through the folder's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from os import PathLike
from pathlib import Path

from vegas_ops.arguments import check_kind
from vegas_ops.models.config import ModelFolderError, check_file

_MAX_TOKENIZER_BYTES = 256 << 20
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """Thin wrapper over the `tokenizers` library."""

    def __init__(self, folder: str | Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelFolderError("reading text needs `pip install tokenizers`") from None
        check_kind("folder", folder, (str, PathLike), "a folder")
        path = Path(folder) / "tokenizer.json"
        check_file(path, _MAX_TOKENIZER_BYTES)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelFolderError(f"{path}: must be a tokenizer, got {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens added."""
        check_kind("text", text, str, "one text")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(_ids("token_ids", token_ids), skip_special_tokens=True))

    def stream(self) -> Callable[[Sequence[int]], str]:
        """A function that takes new ids and returns the text they complete.

        Characters whose bytes are spread over tokens are held back until they are whole.
        """
        ids: list[int] = []
        start = 0  # ids before it are final, and need no decoding again
        shown = ""

        def push(new_ids: Sequence[int]) -> str:
            nonlocal start, shown
            ids.extend(_ids("new_ids", new_ids))
            text = self.decode(ids[start:])
            if text.endswith(_REPLACEMENT):
                return ""
            piece = text[len(shown) :]
            shown = text
            if len(ids) - start > 64:
                # A short overlap keeps decoders that look at the previous token right.
                start = len(ids) - 4
                shown = self.decode(ids[start:])
            return piece

        return push


def _ids(name: str, token_ids: Sequence[int]) -> list[int]:
    try:
        ids = [index(t) for t in token_ids]
    except TypeError:
        raise TypeError(f"`{name}` must hold token ids, got {token_ids!r:.60}") from None
    if any(not 0 <= t < 2**32 for t in ids):
        raise ValueError(f"`{name}` must hold token ids, got {token_ids!r:.60}")
    return ids
