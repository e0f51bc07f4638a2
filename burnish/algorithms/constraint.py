"""A cost next to the reward: maximise the reward while the mean cost stays at or below a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


def penalized(adv: Tensor, adv_cost: Tensor, multiplier: float) -> Tensor:
    """(A - lambda A_c) / (1 + lambda). [B] -> [B] or [B,T] -> [B,T]. Safe RLHF, arXiv:2310.12773.

    The division keeps the size of the update when lambda grows.
    """
    if multiplier < 0:
        raise ValueError(f"multiplier is {multiplier}; a negative one would reward the cost")
    return (adv - multiplier * adv_cost) / (1 + multiplier)


@dataclass(slots=True)
class PidMultiplier:
    """The Lagrange multiplier of `mean cost <= limit`, moved by a PID controller. arXiv:2007.03964 algorithm 2.

    e = cost - limit;  I <- max(0, I + e);  D = max(0, cost - cost before);  lambda = max(0, kp e + ki I + kd D).

    kp, kd: lambda per unit of cost; ki: per unit of cost and update. Only ki (kp = kd = 0) is plain dual ascent.
    D counts only a rising cost, so that a falling one does not lift the pressure early; the first update has none.
    `smoothing` is the weight of the past in moving averages of e and of the cost that D compares; 0 uses each as it comes.
    `max_multiplier` bounds lambda, and ki I with it, so that a long time at the bound leaves nothing to unwind.
    Fields after these are the state, plain numbers.
    """

    limit: float
    kp: float
    ki: float
    kd: float
    max_multiplier: float | None = None
    smoothing: float = 0.0
    integral: float = 0.0
    error: float | None = None
    cost: float | None = None
    multiplier: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kp", "ki", "kd"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a negative gain would reward the cost")
        if not any((self.kp, self.ki, self.kd)):
            raise ValueError("kp, ki and kd are all 0, so the multiplier would stay 0")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be at least 0 and below 1")
        if self.max_multiplier is not None and self.max_multiplier <= 0:
            raise ValueError(f"max_multiplier is {self.max_multiplier}; it must be positive")

    def update(self, mean_cost: float) -> float:
        """Takes in the mean cost of one step and returns the new multiplier."""
        if not math.isfinite(mean_cost):
            raise ValueError(f"the mean cost is {mean_cost}; the multiplier cannot take it in")
        error, bound = mean_cost - self.limit, math.inf if self.max_multiplier is None else self.max_multiplier
        self.integral = max(self.integral + error, 0.0)
        if self.ki:
            self.integral = min(self.integral, bound / self.ki)
        before = mean_cost if self.cost is None else self.cost
        self.error = self._smooth(self.error, error)
        self.cost = self._smooth(self.cost, mean_cost)
        rise = max(self.cost - before, 0.0)
        self.multiplier = min(max(self.kp * self.error + self.ki * self.integral + self.kd * rise, 0.0), bound)
        return self.multiplier

    def _smooth(self, before: float | None, now: float) -> float:
        return now if before is None else self.smoothing * before + (1 - self.smoothing) * now
