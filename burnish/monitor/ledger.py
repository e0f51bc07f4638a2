"""Where the time of a step went. The parts and the rest sum to the step exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

# Times are whole multiples of 2**-20 s (about 1 microsecond): such floats add without rounding in any order.
_TICKS_PER_S = 2**20


class Clock:
    """Splits wall-clock time into phases and steps. A step begins when the clock is made, or at the last cut.

    Phases that stand inside another one count for the outer one only, so no second counts twice: what an evaluation
    generates is time of the evaluation.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._step_began = self._now()
        self._phase: str | None = None
        self._phase_began = 0
        self._depth = 0
        self._parts: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as time/<name>_s; also when the block raises."""
        if self._depth == 0:
            if name in ("step", "other"):
                raise ValueError(f"a phase cannot be called {name!r}: that is what the clock computes itself")
            self._phase, self._phase_began = name, self._now()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._count(self._now())

    def cut(self) -> dict[str, float]:
        """End the step: seconds of each phase that took place, time/other_s for the rest, time/step_s for all of it.

        A phase that is still open is split: its time so far belongs to this step, the rest to the next.
        """
        now = self._now()
        if self._depth:
            open_phase = self._phase
            self._count(now)
            self._phase, self._phase_began = open_phase, now
        step = now - self._step_began
        parts = {f"time/{name}_s": ticks / _TICKS_PER_S for name, ticks in self._parts.items()}
        parts["time/other_s"] = (step - sum(self._parts.values())) / _TICKS_PER_S
        parts["time/step_s"] = step / _TICKS_PER_S
        self._parts, self._step_began = {}, now
        return parts

    def _count(self, now: int) -> None:
        self._parts[self._phase] = self._parts.get(self._phase, 0) + now - self._phase_began
        self._phase = None

    def _now(self) -> int:
        return int(self._now_s() * _TICKS_PER_S)


def total(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each phase over the rows of metrics.jsonl: {"generate": ..., "other": ..., "step": ...}."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/"):
                phase = name.removeprefix("time/").removesuffix("_s")
                seconds[phase] = seconds.get(phase, 0.0) + value
    return seconds
