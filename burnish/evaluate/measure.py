"""How sure a measurement is: intervals, paired tests, pass@k. Needs no torch.

A value of None could not be measured: it is left out and counted, in pairs with its partner, and never becomes a 0.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

Value = float | None

MAX_EXACT_ITEMS = 14
NUM_DRAWS = 9999


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` and `high` are None where one number alone tells nothing about its spread."""

    mean: float
    low: float | None
    high: float | None
    num_items: int
    num_missing: int
    method: str


@dataclass(frozen=True, slots=True)
class Paired:
    """`difference` is after - before, over the items that both sides measured; `p` is two-sided."""

    difference: float
    low: float | None
    high: float | None
    p: float
    method: str
    num_items: int
    num_missing: int


def interval(values: Sequence[Value], *, level: float = 0.95) -> Interval:
    """The mean of independent items with its confidence interval.

    Wilson's score interval where every item is 0 or 1 (Wilson 1927); else Student's t. Several samples of one item are not
    independent: pass their mean as one value. Raises ValueError if nothing was measured.
    """
    found = [float(v) for v in values if v is not None]
    missing = len(values) - len(found)
    _check(found, level)
    if _is_binary(found):
        low, high = wilson(round(sum(found)), len(found), level=level)
        return Interval(sum(found) / len(found), low, high, len(found), missing, "wilson")
    return Interval(*_t_interval(found, level), len(found), missing, "t")


def paired(before: Sequence[Value], after: Sequence[Value], *, seed: int = 0, level: float = 0.95) -> Paired:
    """Did the same items change? before[i] and after[i] are the same item.

    0/1 items: McNemar's exact test, the binomial over the items that changed, and the interval of Bonett and Price (2012).
    Otherwise: the sign-flip permutation test of the mean difference, by enumeration for up to 14 changed items, else by 9,999
    draws from the seed with p = (hits + 1) / (draws + 1); and Student's t interval.
    Raises ValueError for lists of different lengths, or if no item was measured on both sides.
    """
    if len(before) != len(after):
        raise ValueError(f"paired needs the same items twice: {len(before)} values before, {len(after)} after")
    both = [(float(b), float(a)) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    missing = len(before) - len(both)
    _check([value for pair in both for value in pair], level)
    differences = [a - b for b, a in both]
    mean = math.fsum(differences) / len(both)
    if _is_binary([value for pair in both for value in pair]):
        won, lost = differences.count(1.0), differences.count(-1.0)
        low, high = _bonett_price(won, lost, len(both), level)
        return Paired(mean, low, high, mcnemar(won, lost), "mcnemar exact", len(both), missing)
    p, method = sign_flip(differences, seed=seed)
    _, low, high = _t_interval(differences, level)
    return Paired(mean, low, high, p, method, len(both), missing)


def wilson(successes: int, num_items: int, *, level: float = 0.95) -> tuple[float, float]:
    """(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)"""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, n = successes / num_items, num_items
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # Exact at the ends, where rounding would leave 1e-17
    return (0.0 if successes == 0 else (centre - half) / scale, 1.0 if successes == n else (centre + half) / scale)


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact p: min(1, 2 P(X <= min(won, lost))), X binomial(won + lost, 1/2). 1 where nothing changed."""
    changed = won + lost
    tail = sum(math.comb(changed, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def sign_flip(differences: Sequence[float], *, seed: int) -> tuple[float, str]:
    """Two-sided p of the mean being 0, and the method: the share of sign patterns whose |sum| is at least the one seen."""
    changed = [d for d in differences if d != 0]
    seen = abs(math.fsum(changed)) - 1e-12 * math.fsum(map(abs, changed))  # sums that are equal on paper must count as equal
    if len(changed) <= MAX_EXACT_ITEMS:
        patterns = itertools.product((1, -1), repeat=len(changed))
        hits = sum(abs(math.fsum(s * d for s, d in zip(signs, changed, strict=True))) >= seen for signs in patterns)
        return hits / 2 ** len(changed), "sign-flip exact"
    draw = random.Random(seed)
    total = math.fsum(changed)
    hits = 0
    for _ in range(NUM_DRAWS):
        bits = draw.getrandbits(len(changed))
        flipped = sum(d for i, d in enumerate(changed) if bits >> i & 1)
        hits += abs(total - 2 * flipped) >= seen
    return (hits + 1) / (NUM_DRAWS + 1), "sign-flip drawn"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct: 1 - C(n-c, k) / C(n, k), unbiased (arXiv:2107.03374 eq. 1)."""
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct is {num_correct} of {num_samples} samples")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; it needs at least 1 and at most the {num_samples} samples drawn for each task")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(rewards: Sequence[Sequence[Value]], k: int, *, success_reward: float = 1.0, level: float = 0.95) -> Interval:
    """pass@k over tasks; rewards[i] are the samples of task i. A task with fewer than k scored samples counts as missing."""
    values: list[Value] = []
    for samples in rewards:
        scored = [r for r in samples if r is not None]
        correct = sum(r >= success_reward for r in scored)
        values.append(pass_at_k(len(scored), correct, k) if len(scored) >= k else None)
    return interval(values, level=level)


def _check(values: Sequence[float], level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1")
    if not values:
        raise ValueError("nothing was measured: every value is missing")
    if not all(map(math.isfinite, values)):
        raise ValueError("values must be finite; pass None for what could not be measured")


def _is_binary(values: Sequence[float]) -> bool:
    return all(v in (0.0, 1.0) for v in values)


def _bonett_price(won: int, lost: int, n: int, level: float) -> tuple[float, float]:
    """Wald's interval of a difference of paired shares, with one item added to each kind of change."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def _t_interval(values: Sequence[float], level: float) -> tuple[float, float | None, float | None]:
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None, None
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = t_quantile((1 + level) / 2, n - 1) * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def t_quantile(p: float, df: int) -> float:
    """Student's t, p in (0.5, 1), by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: int) -> float:
    """P(T <= t), t >= 0: 1 - I_x(df/2, 1/2) / 2 with x = df / (df + t^2)."""
    x = df / (df + t * t)
    return 1.0 - 0.5 * _incomplete_beta(df / 2, 0.5, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised I_x(a, b) by its continued fraction (DLMF 8.17.22, modified Lentz), mirrored to where it converges fast."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 / ((1.0 - (a + b) * x / (a + 1)) or tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or tiny)
            c = (1.0 + term / c) or tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction
