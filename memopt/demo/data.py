"""The text to learn, as bytes: by default the reference that CPython carries for help()."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from memopt._errors import UsageError


def load_text(path: Path | None) -> bytes:
    """The file's bytes, or without a path Python's own documentation (about 450 kB of English)."""
    if path is None:
        return _python_documentation()
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--text: cannot read {path}: {error.strerror}") from None


def _python_documentation() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "this Python comes without its documentation (pydoc_data): give a text with --text FILE"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Batches:
    """Random windows of the text, drawn from the seed: each mode's i-th step gets the same."""

    def __init__(self, text: bytes, batch: int, context: int, steps: int, seed: int) -> None:
        windows = len(text) - context
        if windows < 1:
            raise UsageError(
                f"text too short: must have at least {context + 1} bytes, got {len(text)}"
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._within = torch.arange(context + 1)
        generator = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(windows, (steps, batch, 1), generator=generator)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and, one byte further, targets: int64 [batch, context] each, on the CPU."""
        window = self._text[self._starts[step] + self._within].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
