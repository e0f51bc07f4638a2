"""When a sequence ends: end tokens, stop strings that may straddle tokens, and the text without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Stops:
    """Decides after each token. `end_token_ids` are ids; `stop` are texts, found wherever token borders lie."""

    def __init__(self, tokenizer: Any, *, end_token_ids: Sequence[int], stop: Sequence[str], min_new_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.stop = tuple(stop)
        self.min_new_tokens = min_new_tokens
        self.last_chars = {s[-1] for s in stop}
        self.window = max((len(s.encode()) for s in stop), default=0) + 8
        self.can_complete: dict[int, bool] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def after(self, tokens: Sequence[int], start: int = 0) -> str | None:
        """Why the turn that began at `start` ends after these tokens, or None. The last token is the new one."""
        first = start + self.min_new_tokens
        if len(tokens) <= first:
            return None
        if tokens[-1] in self.end_token_ids:
            return "end_token"
        if self.stop and self._may_complete(tokens[-1]):
            tail = self.decode(tokens[max(len(tokens) - self.window, first) :])
            if any(s in tail for s in self.stop):
                return "stop_string"
        return None

    def text(self, tokens: Sequence[int], reason: str) -> str:
        """What the policy wrote, without the end token or the stop string and what follows it in the same token."""
        if reason == "end_token":
            return self.decode(tokens[:-1])
        text = self.decode(tokens)
        if reason == "stop_string":
            start = len(self.decode(tokens[: self.min_new_tokens])) if self.min_new_tokens else 0
            cut = min((at for s in self.stop if (at := text.find(s, start)) >= 0), default=len(text))
            return text[:cut]
        return text

    def _may_complete(self, token: int) -> bool:
        """Can a stop string end inside this token? Decoded once per token; an incomplete character might be anything."""
        if token not in self.can_complete:
            piece = self.decode([token])
            spaced = " " in self.last_chars   # some tokenizers drop a leading space when decoding
            self.can_complete[token] = spaced or "\ufffd" in piece or any(c in piece for c in self.last_chars)
        return self.can_complete[token]
