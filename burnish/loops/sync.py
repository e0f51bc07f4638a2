"""Generate, learn, publish, in turn. With one update a step every rollout comes from the weights that are then trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from burnish.engines.base import Engine
from burnish.rollout.keep import Kept
from burnish.rollout.run import Visit
from burnish.trainer.state import TrainState
from burnish.types import Batch, Group


class Clock(Protocol):
    def phase(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All that a step made. Taps read it."""

    step: int
    groups: Sequence[Group]
    kept: Kept
    batch: Batch
    metrics: dict[str, float]


Tap = Callable[[StepRecord], None]


def sync(
    state: TrainState,
    *,
    steps: int,
    next_visits: Callable[[], list[Visit]],
    roll: Callable[[list[Visit]], list[Group]],
    keep: Callable[[Sequence[Group]], Kept],
    assemble: Callable[[Sequence[Group]], Batch],
    update: Callable[[Batch], dict[str, float]],
    engine: Engine,
    clock: Clock,
    taps: Sequence[Tap] = (),
) -> None:
    """Until `steps` steps are done: tasks -> groups -> what is kept -> batch -> update -> the engine's new version -> taps."""
    while state.step < steps:
        groups = roll(next_visits())
        kept = keep(groups)
        with clock.phase("train"):
            batch = assemble(kept.groups)
            metrics = update(batch)
        engine.load(state.version)
        state.step += 1
        for tap in taps:
            tap(StepRecord(state.step, groups, kept, batch, metrics))
