"""What the trainer needs to know of a method: which columns, and its share of the loss of an update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from burnish.trainer.columns import Against
from burnish.types import Row


class ShapeError(ValueError):
    """A loss that does not return one number for each of what it is given."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one whole update, however it is split into micro-batches; of all its rows, whatever algorithm trains them."""

    num_tokens: int                        # trained tokens
    num_rollouts: int                      # rows with at least one
    num_units: int                         # rows, or pairs where rows_per_unit is 2
    tokens_by_place: tuple[int, ...]       # trained tokens of the first rows of all units, of the second, ...
    kept_tokens: int = 0                   # trained tokens without those that a correction dropped ahead of the update
    kept_rollouts: int = 0                 # rows with at least one of these
    totals: Mapping[str, float] = field(default_factory=dict)      # of the rows' numbers

    @classmethod
    def of(cls, rows: Sequence[Row], *, rows_per_unit: int = 1) -> Counts:
        lengths = [row.num_tokens for row in rows]
        kept = [int(sum(row.columns.get("kept", row.mask))) for row in rows]
        return cls(
            num_tokens=sum(lengths), num_rollouts=sum(n > 0 for n in lengths), num_units=len(rows) // rows_per_unit,
            tokens_by_place=tuple(sum(lengths[i::rows_per_unit]) for i in range(rows_per_unit)),
            kept_tokens=sum(kept), kept_rollouts=sum(n > 0 for n in kept),
            totals={name: math.fsum(row.numbers.get(name, 0.0) for row in rows) for name in {n for row in rows for n in row.numbers}},
        )

    @property
    def of_reduce(self) -> dict[str, int]:
        return {"num_tokens": self.num_tokens, "num_rollouts": self.num_rollouts}

    @property
    def of_kept(self) -> dict[str, int]:
        return {"num_tokens": self.kept_tokens, "num_rollouts": self.kept_rollouts}


@dataclass(slots=True)
class Tally:
    """Sums and counts, pooled over micro-batches, so that a metric does not depend on the split."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: Tensor | float, count: float) -> None:
        self.sums[name] += float(total)
        self.counts[name] += count

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(value, self.peaks.get(name, value))

    def values(self) -> dict[str, float]:
        return {name: self.sums[name] / count for name, count in self.counts.items() if count} | self.peaks


class Objective(Protocol):
    """A method of training. `terms` gives shares that add up over the micro-batches of an update to its loss.

    needs: columns it reads; those in trainer.columns.COMPUTED come out of the model. against: columns that compare with frozen
    models, by name. coupled: a row's gradient depends on other rows of the update, so the trainer first looks at all of them.
    needs_signal: a column without which there is nothing to learn: rows whose column is all 0 make no update.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def against(self) -> Mapping[str, Against]: ...

    @property
    def coupled(self) -> bool: ...

    @property
    def needs_signal(self) -> str | None: ...

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]: ...

    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None: ...
