"""What stands between the engine and vLLM: requests as plain values, and what a process with vLLM answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from burnish.engines.base import EngineError

Settings = Mapping[str, Any]
"""Sampling settings by vLLM's names, every one of them given."""

WORKER = "burnish.engines.vllm.worker.WeightsFromTrainer"

OURS = {
    "model": "the first argument",
    "max_model_len": "context_tokens",
    "dtype": "dtype",
    "logprobs_mode": "nothing: log-probs are always those of the distribution sampled from",
    "generation_config": "nothing: no sampling setting is taken from the model's folder",
    "override_generation_config": "nothing: no sampling setting is taken from elsewhere",
    "worker_extension_cls": "nothing: it is how weights are published",
    "trust_remote_code": "nothing: no code from a model's folder is run",
    "served_model_name": "nothing", "host": "nothing: the server listens on 127.0.0.1", "port": "nothing: a free one is taken",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence to continue by at most max_tokens, at least 1 and inside of the context."""

    tokens: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Written:
    """finish: stop | length | abort. error: what went wrong, or None."""

    tokens: tuple[int, ...] = ()
    logp: tuple[float | None, ...] = ()
    finish: str = "abort"
    error: str | None = None


class Link(Protocol):
    context_tokens: int
    vocabulary: int

    def submit(self, id_: int, ask: Ask, settings: Settings) -> None: ...

    def cancel(self, id_: int) -> None: ...

    def advance(self) -> list[tuple[int, Written]]:
        """What has ended; waits for something to happen. Raises EngineError where the engine itself is gone."""
        ...

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing is running. Returns when all workers have the weights and no prefix of earlier ones is remembered."""
        ...

    def check_version(self, version: int) -> None:
        """Raises EngineError where vLLM's weights are not those of `version`."""
        ...

    def close(self) -> None: ...


def vllm_settings(
    *, model: str, dtype: str, context_tokens: int | None, seed: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of vLLM's engine by their Python names. Raises EngineError for an option that burnish sets itself."""
    for name in options:
        if name in OURS:
            raise EngineError(f"the vllm engine sets {name} itself; remove it from the options and use {OURS[name]}")
    own = {
        "model": model, "dtype": dtype, "seed": seed, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
        "worker_extension_cls": WORKER,
    }
    return {**own, **({"max_model_len": context_tokens} if context_tokens else {}), **options}
