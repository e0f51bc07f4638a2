"""Losses of reward models before the run: what they ask for, whether their values make sense, and whether the data has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from burnish.config import RewardModel, Settings
from burnish.data.tasks import Split
from burnish.plan.references import ROOMS, part, raised
from burnish.ref import Ref, RefError, parameters
from burnish.trainer.scores import CLASS_SCORES, IGNORE_LABEL, PAIR_SCORES, RATED_SCORES, STEP_SCORES
from burnish.types import Pair, Rated

Kind = Literal["pairs", "ratings", "classes", "steps"]
COLUMNS: dict[Kind, tuple[str, ...]] = {"pairs": PAIR_SCORES, "ratings": RATED_SCORES, "classes": CLASS_SCORES, "steps": STEP_SCORES}
"""What a loss of each kind may ask for."""
PLACE = "reward_model.loss"


def kind_of_loss(ref: Ref) -> Kind:
    """What a loss is of, by what it asks for. RefError where it does not import."""
    names = _names(ref)
    if {"score_chosen", "score_rejected"} & names:
        return "pairs"
    return "steps" if "logits" in names else "classes" if "thresholds" in names else "ratings"


def problems_of_reward_model(s: Settings) -> Iterator[str]:
    """Problems of the section reward_model, if there is one."""
    r = s.reward_model
    if r is None:
        return
    yield from part("reward_model.reduce", r.reduce, ("loss", "mask", "num_tokens", "num_rollouts"))
    try:
        kind = kind_of_loss(r.loss)
    except RefError as error:
        yield f"{PLACE}: {error}"
        return
    problems = list(part(PLACE, r.loss, COLUMNS[kind]))
    if problems:
        told = "; ".join(f"one of {name} for {', '.join(columns)}" for name, columns in COLUMNS.items())
        yield f"{problems[0]}. A loss may ask for columns of one kind: {told}"
        return
    if not {"score_chosen", "score_rejected", "score", "logits"} & _names(r.loss):
        yield f"{PLACE}: {r.loss.path} takes no score, so it has no gradient"
        return
    yield from _beside(r, kind)
    yield from _tried(r, kind)


def problems_of_ratings(s: Settings, answers: Split) -> Iterator[str]:
    """What the loss needs of the data and does not find there."""
    try:
        kind = kind_of_loss(s.reward_model.loss)
    except RefError:
        return
    r, path, loss = s.reward_model, s.data.source.path, s.reward_model.loss.path
    items = [*answers.train, *answers.held_out]
    if (kind == "pairs") != isinstance(items[0], Pair):
        have, wants = type(items[0]).__name__, "Pair, and for single answers use squared_error or ordinal" if kind == "pairs" else (
            "Rated, and for pairs use bradley_terry")
        yield f"data: {path} gives burnish.types.{have}, and reward_model.loss {loss} learns from {wants}"
    elif kind != "pairs":
        yield from _rated(items, kind, r, path)


def _rated(items: Sequence[Rated], kind: Kind, r: RewardModel, path: str) -> Iterator[str]:
    wanted = {"ratings": r.outputs, "classes": 1}
    for item in items:
        where = f"data: {path}, entry {item.id}"
        if (kind == "steps") != bool(item.steps):
            yield f"{where} has " + ("no steps, and reward_model.loss judges steps" if kind == "steps" else (
                "steps, which only a loss of steps (step_cross_entropy) reads"))
            return
        if kind != "steps" and len(item.ratings) != wanted[kind]:
            say = f"reward_model.outputs={r.outputs}" if kind == "ratings" else "one class an answer"
            yield f"{where} has {len(item.ratings)} ratings, and what is learned is {say}"
            return
        most = {"classes": r.classes or 2, "steps": r.outputs}.get(kind)
        if most and (wrong := [v for v in item.ratings if v is not None and v not in range(most)]):
            name = "classes" if kind == "classes" else "outputs"
            yield f"{where} is rated {wrong[0]:g}; with reward_model.{name}={most} ratings are whole numbers from 0 to {most - 1}"
            return
    if all(v is None for item in items for v in item.ratings):
        yield f"data: {path} gives no rating that is known"


def _beside(r: RewardModel, kind: Kind) -> Iterator[str]:
    """Settings beside the loss that it does not read, or needs."""
    path = r.loss.path
    if r.center_coef and kind != "pairs":
        yield f"reward_model.center_coef ties the two scores of a pair, and {path} is not of pairs; remove it"
    if (r.classes is None) == (kind == "classes"):
        yield "reward_model.classes " + (
            f"is needed: {path} learns ordered classes; say how many" if r.classes is None else f"is for ordinal, not for {path}; remove it"
        )
    if r.reduce != RewardModel.model_fields["reduce"].default and kind != "steps":
        yield f"reward_model.reduce is for steps, and {path} scores whole answers; remove it"
    if r.outputs > 1 and kind in ("pairs", "classes"):
        yield f"reward_model.outputs is {r.outputs}, and {path} learns one score an answer; set it to 1"
    if r.outputs < 2 and kind == "steps":
        yield f"reward_model.outputs is {r.outputs}, and {path} gives each step a class; set it to how many there are, at least 2"


def _tried(r: RewardModel, kind: Kind) -> Iterator[str]:
    """A call with two pairs, answers or steps, which meets values that make no sense."""
    column, label = torch.tensor([0.5, -0.5]), torch.tensor([0, 1])
    known = dict.fromkeys(("score_chosen", "score_rejected", "margin", "score", "target"), column) | {
        "mask": torch.tensor([True, True]), "label": label, "thresholds": torch.tensor([0.0]),
    }
    if kind == "steps":
        known = {"logits": torch.zeros(1, 2, 2), "label": label[None], "ignore_label": IGNORE_LABEL}
    shape = (1, 2) if kind == "steps" else (2,)
    fn: Callable[..., Any] = partial(r.loss.load(room=ROOMS[PLACE]), **r.loss.values)
    try:
        value = fn(**{name: known[name] for name in _names(r.loss) & known.keys()})
    except Exception as error:
        yield f"{PLACE}: {raised(r.loss, error)}"
        return
    if getattr(value, "shape", None) != shape:
        found = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        yield f"{PLACE}: {r.loss.path} returned {found} for 2 {kind}; it gives one number for each, and takes no mean"


def _names(ref: Ref) -> set[str]:
    return set(parameters(ref.load(room=ROOMS[PLACE]))) - set(ref.values)
