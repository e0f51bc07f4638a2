"""The training module as a sampler: own cache, continuous batching, each distinct prompt prefilled once.

There is no second copy of the weights: a new version is there as soon as the optimizer has stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from burnish.chat.template import end_token_ids
from burnish.config import Sampling
from burnish.engines.base import Abilities, Completion, EngineError, Request
from burnish.engines.native.cache import SlotCache, prefix_of
from burnish.engines.native.sampler import MIN_ROWS, draw, uniforms
from burnish.engines.native.stops import Stops
from burnish.models.policy import Policy

# N sequences being decoded, V vocabulary, S positions of the cache


@dataclass(slots=True)
class _Sequence:
    """A request in a slot. Its newest token is not in the cache yet."""

    index: int                     # place of the request
    request: Request
    limit: int                     # tokens it may still be given in all
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.tokens)


@dataclass(slots=True)
class _Prefix:
    """A prefilled prompt: keys and values of each layer, and the logits [V] of what follows."""

    keys_values: list[tuple[Tensor, Tensor]]
    logits: Tensor


class NativeEngine:
    """Samples with the trainer's module. `slots` sequences are decoded side by side; a finished one's slot is refilled."""

    abilities = Abilities(logprobs=True, shares_weights=True)

    def __init__(self, policy: Policy, tokenizer: Any, *, context_tokens: int, slots: int = 64) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.context_tokens, self.slots = context_tokens, slots
        self.version = 0
        self.cache: SlotCache | None = None
        self.windows = _windows(policy.config.get_text_config())

    def load(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.cache = None

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests; see Engine. Uses the module in eval mode and leaves it as it was."""
        training = self.policy.module.training
        self.policy.module.eval()
        try:
            return _Run(self, requests, sampling, progress).completions()
        finally:
            self.policy.module.train(training)

    def prefill(self, tokens: Sequence[int]) -> _Prefix:
        """One prompt alone, so that its numbers do not depend on what else is being sampled."""
        cache = DynamicCache()
        token_BT = torch.tensor([tokens], device=self.policy.device)
        hidden = self.policy.hidden(token_BT, cache=cache)
        last = hidden[0, -1:].expand(MIN_ROWS, -1).contiguous()
        return _Prefix(prefix_of(cache), self.policy.logits(last)[0])

    def decode(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        """One step of the active slots: write these tokens at these positions, return the next logits. [N], [N] -> [N,V]"""
        cache = self.cache
        cache.at(position_N)
        masks = {kind: self._mask(position_N, window) for kind, window in self.windows.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        hidden = self.policy.hidden(token_N[:, None], position_BT=position_N[:, None], mask=mask, cache=cache)
        return self.policy.logits(hidden[:, -1])

    def _mask(self, position_N: Tensor, window: int | None) -> Tensor:
        """Added to the attention scores: 0 where a position is seen, the lowest number elsewhere. [N] -> [N,1,1,S]"""
        seen = torch.arange(self.cache.span, device=position_N.device)[None, :]
        visible = seen <= position_N[:, None]
        if window is not None:
            visible &= seen > position_N[:, None] - window
        dtype = self.policy.head.weight.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)[:, None, None]


class _Run:
    """One call of generate."""

    def __init__(
        self, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int, int], None] | None
    ) -> None:
        self.engine, self.requests, self.sampling, self.progress = engine, requests, sampling, progress
        ends = end_token_ids(engine.tokenizer, sampling.end_tokens)
        self.stops = Stops(engine.tokenizer, end_token_ids=ends, stop=sampling.stop)
        self.done: dict[int, Completion] = {}
        self.active: list[_Sequence] = []
        self.prefixes: dict[tuple[int, ...], _Prefix] = {}
        self.waiting: list[_Sequence] = []
        for index, request in enumerate(requests):
            room = engine.context_tokens - len(request.tokens)
            if not request.tokens:
                self._refuse(index, "empty_prompt")
            elif room < 1:
                self._refuse(index, "prompt_too_long")
            else:
                self.waiting.append(_Sequence(index, request, min(request.max_new_tokens, room)))
        self.users = Counter(s.request.tokens for s in self.waiting)
        self.waiting.reverse()

    def completions(self) -> list[Completion]:
        self._make_cache()
        while self.waiting or self.active:
            logits = self._decode() if self.active else []
            self._sample(torch.cat([*logits, *self._admit()]))
            self._retire()
            if self.progress:
                self.progress(len(self.done), len(self.requests))
        return [self.done[i] for i in range(len(self.requests))]

    def _make_cache(self) -> None:
        if not self.waiting:
            return
        length = -(-max(len(s.request.tokens) + s.limit for s in self.waiting) // 16) * 16
        slots = max(min(self.engine.slots, len(self.waiting)), MIN_ROWS)
        if self.engine.cache is None or not self.engine.cache.fits(slots=slots, length=length):
            self.engine.cache = SlotCache(slots=slots, length=length)

    def _admit(self) -> list[Tensor]:
        """Fill free slots. The first token comes from the logits [1,V] at the end of the prompt, which a group shares."""
        logits = []
        while self.waiting and len(self.active) < self.engine.slots:
            sequence = self.waiting.pop()
            prompt = sequence.request.tokens
            if prompt not in self.prefixes:
                self.prefixes[prompt] = self.engine.prefill(prompt)
            prefix = self.prefixes[prompt]
            self.engine.cache.put(len(self.active), prefix.keys_values)
            self.active.append(sequence)
            logits.append(prefix.logits[None])
            self.users[prompt] -= 1
            if not self.users[prompt]:
                del self.prefixes[prompt]
        return logits

    def _decode(self) -> list[Tensor]:
        """Logits [N,V] after the newest token of each active sequence. Rows that only fill up run in free slots."""
        n, device = len(self.active), self.engine.policy.device
        fill = [0] * (MIN_ROWS - n)
        token_N = torch.tensor([s.tokens[-1] for s in self.active] + fill, device=device)
        position_N = torch.tensor([s.length - 1 for s in self.active] + fill, device=device)
        return [self.engine.decode(token_N, position_N)[:n]]

    def _sample(self, logits_NV: Tensor) -> None:
        stream = np.array([s.request.stream for s in self.active], dtype=np.uint64)
        index = np.array([s.length for s in self.active], dtype=np.uint64)
        token_N, logp_N = draw(logits_NV, uniforms(stream, index), self.sampling)
        for sequence, token, logp in zip(self.active, token_N.tolist(), logp_N.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logp.append(logp)

    def _retire(self) -> None:
        """Take out what has ended; the last active sequence moves into the freed slot."""
        slot = 0
        while slot < len(self.active):
            sequence = self.active[slot]
            reason = self._ended(sequence)
            if reason is None:
                slot += 1
                continue
            self._finish(sequence, reason)
            last = self.active.pop()
            if slot < len(self.active):
                self.engine.cache.move(len(self.active), slot, last.length - 1)
                self.active[slot] = last

    def _ended(self, sequence: _Sequence) -> str | None:
        if sequence.tokens[-1] < 0:
            return "error:non_finite_logits"
        if reason := self.stops.after(sequence.tokens):
            return reason
        if len(sequence.tokens) < sequence.limit:
            return None
        return "max_tokens" if sequence.limit == sequence.request.max_new_tokens else "context"

    def _finish(self, sequence: _Sequence, reason: str) -> None:
        tokens, logp = sequence.tokens, sequence.logp
        if reason.startswith("error:"):
            tokens, logp = tokens[:-1], logp[:-1]
        self.done[sequence.index] = Completion(
            tokens=tuple(tokens), logp_gen=tuple(logp), text=self.stops.text(tokens, reason), stop=reason, version=self.engine.version
        )

    def _refuse(self, index: int, what: str) -> None:
        self.done[index] = Completion((), (), "", f"error:{what}", self.engine.version)


def _windows(config: Any) -> dict[str, int | None]:
    """The kinds of attention layer of this architecture and how far back each looks."""
    if hasattr(config, "attention_types"):
        raise EngineError(f"the native engine does not know {config.model_type}'s attention_types, so its samples would be wrong")
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {"full_attention": window}
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise EngineError(
            f"the native engine keeps keys and values; {config.model_type} also has layers of the kinds {sorted(unknown)}, "
            "which keep another state. Use a model with attention layers only"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
