"""What a server wrote, as a Completion: token ids and log-probs are checked, and how the turn ended is judged here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from burnish.config import Sampling
from burnish.engines.base import Completion
from burnish.engines.calls import CallError, Progress
from burnish.engines.native.stops import Stops

NEVER_NATS = -9999.0       # what servers write for a token without a number


def token_ids(value: Any, *, name: str, limit: int) -> tuple[int, ...]:
    """Raises CallError unless `value` is a list of 1 to `limit` token ids."""
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 2**31 for v in value):
        raise CallError(f"{name} is no list of token ids", at_server=True)
    if not 1 <= len(value) <= limit:
        raise CallError(f"{name} holds {len(value)} tokens; 1 to {limit} were asked for", at_server=True)
    return tuple(value)


def log_probs(value: Any, *, count: int) -> tuple[float, ...]:
    """The log-probs of `count` tokens, or none at all where one is missing or no log-prob."""
    if not isinstance(value, list) or len(value) != count:
        return ()
    fine = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and NEVER_NATS < v <= 1e-4 for v in value)
    return tuple(map(float, value)) if fine else ()


def written(
    tokens: tuple[int, ...], logp: tuple[float, ...], *, sampling: Sampling, stops: Stops, by_length: bool, max_new_tokens: int,
    version: int,
) -> Completion:
    """The completion of sampled tokens, cut where the turn ended. by_length: the server says that it was cut off there.

    One that is shorter than max_new_tokens filled the context. Raises CallError where the server ended it by a token that ends none here.
    """
    if sampling.temperature == 0 and logp:
        logp = (0.0,) * len(tokens)           # the most probable token is drawn with probability 1
    head: list[int] = []
    for token in tokens:
        head.append(token)
        if reason := stops.after(head):
            return Completion(tuple(head), logp[: len(head)], stops.text(head, reason), reason, version)
    if not by_length:
        raise CallError(f"the turn was ended by token {tokens[-1]}, which ends none here; name it in sampling.end_tokens", at_server=False)
    return Completion(tokens, logp, stops.decode(tokens), "max_tokens" if len(tokens) >= max_new_tokens else "context", version)


def unserved(tokens: Sequence[int], *, context_tokens: int | None, version: int) -> Completion | None:
    """The completion of a prompt that no server is asked about: empty, or as long as the context."""
    what = "empty_prompt" if not tokens else "prompt_too_long" if context_tokens and len(tokens) >= context_tokens else None
    return None if what is None else Completion((), (), "", f"error:{what}", version)


def told_of(progress: Progress | None, total: int) -> Progress | None:
    """Progress of calls as progress of all `total` requests, some of which need no call."""
    return None if progress is None else lambda done, calls: progress(total - calls + done, total)


def failed(error: CallError, *, version: int) -> Completion:
    """The completion of a call that failed; a prompt beyond the server's context is told as every engine tells it."""
    too_long = not error.at_server and any(s in error.what.lower() for s in ("context length", "context_length", "longer than the model"))
    return Completion((), (), "", "error:prompt_too_long" if too_long else error.stop, version)
