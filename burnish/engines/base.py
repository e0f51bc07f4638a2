"""What an engine is: it continues token sequences and says exactly how probable each token was when it drew it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from burnish.config import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. `stream` is a 64-bit key: token i is drawn from number (stream, i), i counted from tokens[0]."""

    tokens: tuple[int, ...]
    stream: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine wrote. stop: end_token | stop_string | max_tokens | context | error:<what>."""

    tokens: tuple[int, ...]
    logp_gen: tuple[float, ...]    # nats, under temperature and filters as sampled
    text: str                      # without end token and stop string
    stop: str
    version: int


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do, as data."""

    logprobs: bool
    shares_weights: bool           # samples from the trainer's own weights, nothing to publish


class EngineError(ValueError):
    """A model that this engine cannot sample from."""


class Engine(Protocol):
    abilities: Abilities

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests. A request that cannot run gives a Completion with stop error:<what>."""
        ...

    def load(self, version: int) -> None:
        """From now on the weights are those of `version`."""
        ...

    def close(self) -> None: ...
