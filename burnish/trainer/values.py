"""A critic's own objective, and the values that advantages need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.reduce import masked
from burnish.config import Sampling
from burnish.trainer.columns import Against, score_rows
from burnish.trainer.objective import Counts, Tally
from burnish.types import Rollout, Row


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """reduce(value loss) for a critic that is a model of its own."""

    loss: Callable[..., Tensor]
    reduce: Callable[..., Tensor]

    needs = frozenset({"value_cur", "value_prox", "ret"})
    coupled = False
    needs_signal = None

    @property
    def against(self) -> Mapping[str, Against]:
        return {}

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        loss = self.loss(value_cur=columns["value_cur"], value_prox=columns["value_prox"], ret=columns["ret"])
        return {"value": self.reduce(loss, columns["mask"], **counts.of_reduce)}

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        mask = columns["mask"]
        tally.add("train/value_error", (masked(columns["value_cur"] - columns["ret"], mask) ** 2).sum(), int(mask.sum()))


def values_of(
    model: Any, rollouts: Sequence[Rollout], *, sampling: Sampling, tokens_per_micro_batch: int, bootstrap: bool = True
) -> tuple[list[tuple[float, ...]], list[float]]:
    """The critic's value before each sampled token, [T] a rollout, and the value after the last one where a rollout was cut off, else 0.

    Without bootstrap the second is 0 everywhere: each rollout is taken to have ended.
    """
    sized = {"sampling": sampling, "tokens_per_micro_batch": tokens_per_micro_batch}
    values = score_rows(model, [Row(r.tokens, r.sampled) for r in rollouts], column="value_cur", **sized)
    cut = [i for i, r in enumerate(rollouts) if r.truncated] if bootstrap else []
    ends = score_rows(
        model, [Row(r.tokens, (False,) * (len(r.tokens) - 1) + (True,)) for r in (rollouts[i] for i in cut)], column="score_cur", **sized
    )
    after = {i: end[-1] for i, end in zip(cut, ends, strict=True)}
    return values, [after.get(i, 0.0) for i in range(len(rollouts))]
