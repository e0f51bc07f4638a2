"""Learn from written answers: take some, make rows of them, update. The loop of sft, preference, reward_model and distill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.loops.sync import Clock
from burnish.trainer.state import TrainState
from burnish.types import Batch


@dataclass(frozen=True, slots=True)
class AnswersRecord:
    """What a step took, the rows that were trained on, the metrics. Taps read it."""

    step: int
    items: Sequence[Any]
    batch: Batch
    metrics: dict[str, float]


def answers(
    state: TrainState,
    *,
    steps: int,
    take: Callable[[], Sequence[Any]],
    assemble: Callable[[Sequence[Any]], Batch],
    update: Callable[[Batch], dict[str, float]],
    clock: Clock,
    taps: Sequence[Callable[[AnswersRecord], None]] = (),
) -> None:
    """Until `steps` steps are done: items -> rows -> updates -> taps."""
    while state.step < steps:
        items = take()
        with clock.phase("train"):
            batch = assemble(items)
            metrics = update(batch)
        state.step += 1
        for tap in taps:
            tap(AnswersRecord(state.step, items, batch, metrics))
