"""Generate, learn, publish, in turn. With one update a step every rollout comes from the weights that are then trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from burnish.engines.base import Engine
from burnish.rollout.gather import Gathered
from burnish.trainer.state import TrainState, publish
from burnish.types import Batch


class Clock(Protocol):
    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All that a step made: what each environment gave, the rows that were trained on, the metrics. Taps read it."""

    step: int
    gathered: Sequence[Gathered]
    batch: Batch
    metrics: dict[str, float]


Tap = Callable[[StepRecord], None]


def sync(
    state: TrainState,
    *,
    steps: int,
    gather: Callable[[], Sequence[Gathered]],
    assemble: Callable[[Sequence[Gathered]], Batch],
    update: Callable[[Batch], dict[str, float]],
    engine: Engine,
    clock: Clock,
    taps: Sequence[Tap] = (),
) -> None:
    """Until `steps` steps are done: rollouts that are kept -> batch -> updates -> the engine's new version -> taps."""
    while state.step < steps:
        gathered = gather()
        with clock.phase("train"):
            batch = assemble(gathered)
            metrics = update(batch)
        publish(state, engine)
        state.step += 1
        for tap in taps:
            tap(StepRecord(state.step, gathered, batch, metrics))
