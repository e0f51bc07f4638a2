"""What loading a model gives, and its one error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


class ModelError(ValueError):
    """A model that cannot be loaded: names the place, what was found there, and what would work."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to train: float32 parameters, eval mode, no dropout but LoRA's."""

    module: torch.nn.Module        # a transformers causal language model, or a PeftModel around one
    tokenizer: Any                 # transformers tokenizer
    context_tokens: int            # most tokens of one sequence, prompt included
    source: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model before any weight is loaded."""

    context_tokens: int
    vocab_size: int                # rows of the embedding
    num_parameters: int | None     # tied weights count once
    end_token: str | None
    has_chat_template: bool
    source: str
    outputs: int | None = None     # numbers of its head of scores; None: it has none


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' for an error message, or nothing."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:400]}" if lines else type(error).__name__
