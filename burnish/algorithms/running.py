"""Normalisation of rewards with statistics that run through training.

Statistics are kept as float64 numbers around the mean, never as E[x^2] - E[x]^2, which cancels where the mean is large. They
include the values being normalised. `dataclasses.asdict` gives the whole state as plain numbers for a JSON file, and
`RunningNorm(**state)` takes it back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RunningNorm:
    """(x - mean) / (std + eps) over all values since the start; x / (std + eps) with center False.

    Parallel update of Chan, Golub and LeVeque (1979): exact, whatever the batches. ddof 1 is the sample variance; the variance of
    ddof values or fewer is 0. `squares` is sum (x - mean)^2.
    """

    eps: float
    ddof: int
    center: bool = True
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        _check(self.eps)

    @property
    def var(self) -> float:
        return self.squares / (self.count - self.ddof) if self.count > self.ddof else 0.0

    def update(self, value: Tensor) -> None:
        """Raises ValueError for a value that is not finite: it would stay in the statistics for ever."""
        if value.numel():
            self._add(*_moments(value))

    def merge(self, other: RunningNorm) -> None:
        """Takes in what another one has seen. The settings stay one's own."""
        if other.count:
            self._add(other.count, other.mean, other.squares)

    def normalize(self, value: Tensor) -> Tensor:
        return _normalize(value, self.mean, self.var, eps=self.eps, center=self.center)

    def __call__(self, value: Tensor) -> Tensor:
        """Update, then normalise. Any shape -> the same."""
        self.update(value)
        return self.normalize(value)

    def _add(self, count: int, mean: float, squares: float) -> None:
        total, gap = self.count + count, mean - self.mean
        self.squares += squares + gap * gap * (self.count * count / total)
        self.mean += gap * (count / total)
        self.count = total


@dataclass(slots=True)
class EmaNorm:
    """As RunningNorm, with exponential averages of each batch's mean and variance: old batches are forgotten.

    mean <- decay mean + (1 - decay) mean_batch, and so for the variance; the first batch gives the start. How the batches' means
    differ is not part of the variance. A batch of ddof values or fewer has variance 0.
    """

    decay: float
    eps: float
    ddof: int
    center: bool = True
    started: bool = False
    mean: float = 0.0
    var: float = 0.0

    def __post_init__(self) -> None:
        _check(self.eps)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay}; it must be at least 0 and below 1")

    def update(self, value: Tensor) -> None:
        """Raises ValueError for a value that is not finite."""
        if not value.numel():
            return
        count, mean, squares = _moments(value)
        var = squares / (count - self.ddof) if count > self.ddof else 0.0
        keep = self.decay if self.started else 0.0
        self.mean, self.var, self.started = keep * self.mean + (1 - keep) * mean, keep * self.var + (1 - keep) * var, True

    def normalize(self, value: Tensor) -> Tensor:
        return _normalize(value, self.mean, self.var, eps=self.eps, center=self.center)

    def __call__(self, value: Tensor) -> Tensor:
        """Update, then normalise. Any shape -> the same."""
        self.update(value)
        return self.normalize(value)


def _moments(value: Tensor) -> tuple[int, float, float]:
    """Count, mean and sum of squares around the mean."""
    x = value.detach().flatten().tolist()
    if not all(map(math.isfinite, x)):
        raise ValueError("values must be finite; leave out what could not be scored")
    mean = math.fsum(x) / len(x)
    return len(x), mean, math.fsum((v - mean) ** 2 for v in x)


def _normalize(value: Tensor, mean: float, var: float, *, eps: float, center: bool) -> Tensor:
    x = value.detach().to("cpu", torch.float64)   # in float32 x - mean has lost its digits where the mean is large
    return ((x - mean if center else x) / (math.sqrt(var) + eps)).to(value.device, torch.result_type(value, 1.0))


def _check(eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be above 0, or equal values are divided by 0")
