"""Written answers: examples, pairs and ratings; their sources, and the split by prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from burnish.data.tasks import Split, canonical, lowest
from burnish.types import Example, Pair, Rated

Answer = Example | Pair | Rated


def split_answers(items: Sequence[Any], *, kinds: tuple[type, ...], held_out: int, seed: int) -> Split:
    """Keep `held_out` of the distinct prompts for evaluation, with all their entries; both sides keep the order of `items`.

    Entries that stand twice, all of them equal, are left out and counted. Raises ValueError for an empty set or one that leaves
    nothing to train on, TypeError for what is none of `kinds` or a mixture of them.
    """
    names = " or ".join(f"burnish.types.{kind.__name__}" for kind in kinds)
    seen: dict[str, Any] = {}
    duplicates = 0
    for position, item in enumerate(items):
        if not isinstance(item, kinds) or type(item) is not type(items[0]):
            raise TypeError(f"item {position} is a {type(item).__name__}, where the source returns a list of {names}, all of one kind")
        _check(position, item)
        if seen.setdefault(item.id, item) is not item:
            if seen[item.id] != item:
                raise ValueError(f"two different entries have the id {item.id!r} (item {position} is the second); give each its own")
            duplicates += 1
    if not seen:
        raise ValueError("the source returned nothing; check its settings (path, filters)")
    prompts = dict.fromkeys(canonical(item.prompt) for item in seen.values())
    if held_out >= len(prompts):
        raise ValueError(
            f"held_out is {held_out}, but the source has {len(prompts)} distinct prompts and at least one must be left to train on; "
            "lower data.held_out or make the source larger"
        )
    kept = lowest(prompts, held_out, seed=seed)
    sides = [[item for item in seen.values() if (canonical(item.prompt) in kept) is side] for side in (False, True)]
    return Split(train=tuple(sides[0]), held_out=tuple(sides[1]), num_duplicates=duplicates)


def _check(position: int, item: Answer) -> None:
    texts = {Example: ("answer",), Pair: ("chosen", "rejected"), Rated: ("answer",)}[type(item)]
    for name in texts:
        if not isinstance(getattr(item, name), str):
            raise TypeError(f"item {position} (id {item.id}): {name} is a {type(getattr(item, name)).__name__}; it is a text")
    if isinstance(item, Pair) and item.chosen == item.rejected:
        raise ValueError(f"item {position} (id {item.id}): chosen and rejected are the same text, which teaches nothing; remove it")
    numbers = [item.margin] if isinstance(item, Pair) else list(item.ratings) if isinstance(item, Rated) else []
    if any(n is not None and not math.isfinite(n) for n in numbers):
        raise ValueError(f"item {position} (id {item.id}): a rating or margin is not finite; leave it out (null) where it is not known")
