"""What an engine is: it continues token sequences and says exactly how probable each token was when it drew it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burnish.config import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. `stream` is a 64-bit key: token i is drawn from number (stream, i), i counted from tokens[0]."""

    tokens: tuple[int, ...]
    stream: int
    max_new_tokens: int
    priority: float = 0.0          # higher ones start first
    session: str | None = None     # requests of one conversation go to the same engine of a pool, which has their history in its cache


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine wrote. stop: end_token | stop_string | max_tokens | context | grammar | cancelled | error:<what>."""

    tokens: tuple[int, ...]
    logp_gen: tuple[float, ...]    # nats, under temperature and filters as sampled; empty from an engine that cannot tell
    text: str                      # without end token and stop string
    stop: str
    version: int                   # of the weights; the oldest where they changed in between
    versions: tuple[int, ...] = () # of the weights that drew each token; empty: all of them `version`


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do, as data. A recipe that needs what is missing is refused before the run."""

    logprobs: bool                 # tells the log-prob of each token under the distribution it was drawn from
    shares_weights: bool           # samples from the trainer's own weights, nothing to publish
    token_ids: bool = True         # takes and gives token ids; else text goes out and comes back, and ids are made of it anew
    streams: bool = True           # a token's random number is that of its request's stream, so any batch gives the same sequence
    publish: bool = True           # takes new weights
    live: bool = True              # requests come, go and are cancelled while others run (`stream`)
    sampling: frozenset[str] = frozenset(Sampling.model_fields)   # the settings of Sampling that it honours


class EngineError(ValueError):
    """A model, a setting or a server that this engine cannot sample with."""


class Engine(Protocol):
    abilities: Abilities
    version: int

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, progress: Callable[[int, int], None] | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests. A request that cannot run gives a Completion with stop error:<what>."""
        ...

    # Abilities.live: stream(expected) -> submit(request, sampling), cancel(id), advance() -> [(id, Completion)]; see NativeEngine

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """From the next step on the weights are those of `version`. `weights`, by the names of the module's state_dict, are given to an
        engine that has its own copy; one that shares the trainer's takes None.
        """
        ...

    def close(self) -> None: ...


def check_sampling(abilities: Abilities, sampling: Sampling, *, name: str) -> None:
    """Raises EngineError where `sampling` sets what the engine `name` does not honour."""
    for field, info in type(sampling).model_fields.items():
        if field not in abilities.sampling and getattr(sampling, field) != info.default:
            raise EngineError(f"the {name} engine does not know sampling.{field}; remove it, or use the native engine")
