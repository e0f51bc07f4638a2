"""Preference losses before the run: what they ask for, whether they go together, and whether their values make sense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from burnish.config import Preference, Settings
from burnish.plan.references import ROOMS, part, raised
from burnish.ref import Ref, RefError, parameters
from burnish.trainer.pairs import PAIR_COLUMNS, SINGLE_COLUMNS


def learns_from_single(p: Preference) -> bool:
    """Whether the losses are of single answers, wanted or not, and not of pairs."""
    def known(ref: Ref) -> bool:
        try:
            return _is_single(ref)
        except RefError:
            return False

    return any(known(term.fn) for term in p.losses)


def takes_running_delta(ref: Ref) -> bool:
    """Whether the loss takes the mean reward so far as its delta, which the recipe did not give."""
    return getattr(ref.load(room=ROOMS["preference.losses"]), "running_delta", False) and "delta" not in ref.values


def problems_of_preference(s: Settings) -> Iterator[str]:
    """Problems of the section preference, if there is one."""
    p = s.preference
    if p is None:
        return
    problems = [problem for i, term in enumerate(p.losses) for problem in _loss(f"preference.losses.{i}", term.fn)]
    yield from problems
    if problems:
        return
    single = [_is_single(term.fn) for term in p.losses]
    if any(single):
        yield from _of_single(s, all(single))
    asked = {name for term in p.losses for name in _names(term.fn)}
    if not {"ref_chosen", "ref_rejected", "ref"} & asked:
        for name in ("reference", "refresh_steps"):
            if getattr(p, name) != type(p).model_fields[name].default:
                yield f"preference.{name} does nothing: none of preference.losses asks for a reference; remove it"
    if p.weigh_by_policy and (coupled := [t.fn.path for t in p.losses if getattr(_function(t.fn), "coupled", False)]):
        yield f"preference.weigh_by_policy weighs pairs, and {coupled[0]} gives its values by rank over all pairs; remove one of the two"


def _of_single(s: Settings, only: bool) -> Iterator[str]:
    p, paths = s.preference, [term.fn.path for term in s.preference.losses]
    if not only:
        yield f"preference.losses: {paths} are partly of pairs and partly of single answers, and data is one or the other; keep one kind"
        return
    for name in ("nll_coef", "length_alpha", "weigh_by_policy"):
        if getattr(p, name) != type(p).model_fields[name].default:
            yield f"preference.{name} is of pairs, and {paths[0]} learns from single answers; remove it"
    if s.loop == "sync":
        yield f"preference.losses: {paths[0]} learns from single written answers; loop: sync makes pairs of samples, so use a loss of pairs"
    elif s.train.examples_per_step < 2 * s.train.minibatches:
        yield (
            f"train.examples_per_step is {s.train.examples_per_step} in {s.train.minibatches} minibatches, and {paths[0]} compares an "
            "answer with those of other examples of the same update; use at least 2 in each"
        )


def _loss(place: str, ref: Ref) -> Iterator[str]:
    try:
        running = takes_running_delta(ref)
    except RefError as error:
        yield f"{place}: {error}"
        return
    columns = SINGLE_COLUMNS if _is_single(ref) else (*PAIR_COLUMNS, *(("delta",) if running else ()))
    problems = list(part(place, ref, columns))
    if problems:
        yield f"{problems[0]}. A loss of pairs may ask for {', '.join(PAIR_COLUMNS)}; one of single answers for {', '.join(SINGLE_COLUMNS)}"
        return
    if not {"cur_chosen", "cur_rejected", "cur"} & _names(ref):
        yield f"{place}: {ref.path} takes neither cur_chosen nor cur_rejected nor cur, so it has no gradient"
        return
    yield from _tried(place, ref, partial(_function(ref), **ref.values))


def _tried(place: str, ref: Ref, fn: Callable[..., Any]) -> Iterator[str]:
    """A call with two pairs or answers, which meets values that make no sense."""
    column = torch.tensor([-1.0, -2.0])
    known = dict.fromkeys((*PAIR_COLUMNS, *SINGLE_COLUMNS), column) | {
        "tokens_chosen": torch.tensor([1, 2]), "tokens_rejected": torch.tensor([2, 1]), "num_pairs": 2, "num_tokens": 3,
        "desirable": torch.tensor([True, False]), "kl": torch.tensor(0.0), "delta": 0.0,
    }
    try:
        value = fn(**{name: known[name] for name in _names(ref) & known.keys()})
    except Exception as error:
        yield f"{place}: {raised(ref, error)}"
        return
    if getattr(value, "shape", None) != (2,):
        shape = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        yield f"{place}: {ref.path} returned {shape} for 2 pairs or answers; a preference loss gives one number for each, and takes no mean"


def _function(ref: Ref) -> Callable[..., Any]:
    return ref.load(room=ROOMS["preference.losses"])


def _names(ref: Ref) -> set[str]:
    return set(parameters(_function(ref))) - set(ref.values)


def _is_single(ref: Ref) -> bool:
    return {"cur", "desirable"} <= _names(ref) or ("cur" in _names(ref) and not {"cur_chosen", "cur_rejected"} & _names(ref))
