"""Judged answers that need no task: digits at random, better the larger their sum. Small reward models learn it in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, TypeVar

from burnish.data.tasks import answer_id
from burnish.types import Pair, Rated

MARK = ">"
T = TypeVar("T", Pair, Rated)


def digit_sum_pairs(*, size: int, length: int = 3, margins: bool = False, seed: int = 0) -> list[Pair]:
    """After "42>" two texts of at most `length` digits and marks, at random; the one with the larger sum of digits is chosen.

    margins: by how much, over the largest possible sum.
    """
    def draw(rng: random.Random) -> Pair | None:
        prompt, texts = _prompt(rng), sorted((_text(rng, length) for _ in range(2)), key=_sum)
        gap = _sum(texts[1]) - _sum(texts[0])
        margin = gap / (9 * length) if margins else None
        return Pair(answer_id(prompt, texts[1], texts[0]), prompt, texts[1], texts[0], margin) if gap else None

    return _distinct(draw, size=size, length=length, seed=seed)


def digit_sum_ratings(
    *, size: int, length: int = 3, kind: Literal["numbers", "classes"] = "numbers", known_frac: float = 1.0, seed: int = 0
) -> list[Rated]:
    """After "42>" a text of at most `length` digits and marks, at random, with ratings.

    kind: numbers: the sum of its digits over the largest possible one, and the share of marks; known_frac of each are given. classes:
    0, 1 or 2 by the third of the possible sums that its sum lies in.
    """
    if not 0 < known_frac <= 1 or (kind == "classes" and known_frac < 1):
        raise ValueError(f"known_frac is {known_frac}; above 0 and at most 1, and 1 for classes")
    def draw(rng: random.Random) -> Rated:
        prompt, text = _prompt(rng), _text(rng, length)
        share = _sum(text) / (9 * length)
        ratings = (float(min(int(3 * share), 2)),) if kind == "classes" else tuple(
            value if rng.random() < known_frac else None for value in (share, text.count(MARK) / length)
        )
        return Rated(answer_id(prompt, text), prompt, text, ratings=ratings)

    return _distinct(draw, size=size, length=length, seed=seed)


def _prompt(rng: random.Random) -> str:
    return f"{rng.randrange(100):02d}{MARK}"


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(f"0123456789{MARK}") for _ in range(rng.randint(0, length)))


def _sum(text: str) -> int:
    return sum(int(c) for c in text if c != MARK)


def _distinct(draw: Callable[[random.Random], T | None], *, size: int, length: int, seed: int) -> list[T]:
    if size < 1 or length < 1:
        raise ValueError(f"size is {size} and length is {length}; both are at least 1")
    rng, out = random.Random(f"digit sums {seed}"), {}
    for _ in range(20 * size):
        if (item := draw(rng)) is not None:
            out.setdefault(item.id, item)
        if len(out) == size:
            return list(out.values())
    raise ValueError(f"size is {size}, but texts of at most {length} characters do not give that many; lower size or raise length")
