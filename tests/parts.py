"""Parts for tests: rows, engines and states over the tiny models of conftest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from burnish.algorithms.policy_losses import ppo_clip
from burnish.algorithms.reduce import token_mean
from burnish.config import Sampling
from burnish.engines.native import NativeEngine
from burnish.engines.native.build import NotBuilt, library
from burnish.models.policy import Policy
from burnish.trainer import Algorithm, TrainState, make_state, train_step
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Row

PLAIN = Sampling()
CLIP = partial(ppo_clip, eps_low=0.2, eps_high=0.28)
GRPO = Algorithm(CLIP, token_mean)


def state_of(loaded, **values) -> TrainState:
    return make_state(loaded.module, **values)


def engine_of(loaded, **values) -> NativeEngine:
    return NativeEngine(Policy(loaded.module), loaded.tokenizer, context_tokens=loaded.context_tokens, **values)


def can_compile() -> bool:
    try:
        library()
    except NotBuilt:
        return False
    return True


def random_rows(num: int = 8, *, vocab: int = 60, seed: int = 0, holes: bool = True, ref: bool = False) -> list[Row]:
    """Rows of unequal lengths, with environment tokens between the policy's, and log-probs near those of a random model."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num):
        prompt, length = rng.randint(1, 6), rng.randint(2, 24)
        sampled = [False] * prompt + [not (holes and rng.random() < 0.25) for _ in range(length)]
        sampled[prompt] = True
        tokens = [rng.randrange(2, vocab) for _ in sampled]
        logp = [-4.1 + rng.uniform(-0.5, 0.5) if s else 0.0 for s in sampled]
        logp_ref = tuple(x + rng.uniform(-0.3, 0.3) if s else 0.0 for x, s in zip(logp, sampled, strict=True)) if ref else None
        row = Row(tuple(tokens), tuple(sampled), {"logp_gen": tuple(logp)}, {"version": 0.0})
        rows.append(row.put(adv=rng.uniform(-2, 2), **({"logp_ref": logp_ref} if ref else {})))
    return rows


def adv_of(row: Row) -> float:
    return next(a for a, m in zip(row.columns["adv"], row.mask, strict=True) if m)


def on_policy(state: TrainState, rows: Sequence[Row]) -> Batch:
    """The rows with the log-probs that the policy gives them now."""
    logp = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=10_000)
    return Batch(tuple(r.put(logp_gen=lp) for r, lp in zip(rows, logp, strict=True)))


def weights_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: m.detach().clone() for name, m in state.weights.masters.items()}


def gradients(state: TrainState, batch: Batch, algo, **values) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    """The gradient of each update of a step, before clip and optimizer, with weights that stay; and the step's metrics."""
    found = []

    def note(state, finite, tally, **_):
        found.append({n: m.grad.clone() for n, m in state.weights.masters.items() if m.grad is not None})
        state.weights.clear_grads()
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burnish.trainer.step._apply", note)
        metrics = train_step(state, batch, algo, **{"sampling": PLAIN, "lr_of": lambda u: 1e-3, "clip_norm": 1.0, **values})
    return found, metrics


def assert_same_gradients(some, others, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """atol is a share of the largest element."""
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        largest = max(float(g.abs().max()) for g in other.values())
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=atol * largest, msg=lambda m, name=name: f"{name}: {m}")
