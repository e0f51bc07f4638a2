"""Objectives of reward models: scores of two answers compared, of one against ratings or classes, and of the steps of an answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.reduce import masked
from burnish.algorithms.reward_losses import centering, prefers_chosen
from burnish.config import Sampling
from burnish.trainer.columns import collate, micro_batches, score
from burnish.trainer.objective import Counts, Objective, ShapeError, Tally
from burnish.types import Batch

PAIR_SCORES = ("score_chosen", "score_rejected", "margin")
"""What a loss of pairs may ask for: [P] each; margin is 0 where it is not known."""
RATED_SCORES = ("score", "target", "mask")
"""What a loss of ratings may ask for: [B] each, or [B,K] with K outputs; mask is True where a rating is known."""
CLASS_SCORES = ("score", "label", "thresholds")
"""What a loss of ordered classes may ask for: [B], [B], [K-1]."""
STEP_SCORES = ("logits", "label", "ignore_label")
"""What a loss of steps may ask for: [B,T,C], [B,T], and the label that stands where no step ends."""
IGNORE_LABEL = -100


@dataclass(frozen=True, slots=True)
class PairScores:
    """The mean of loss(score_chosen, score_rejected) over pairs, and center_coef times that of `centering`.

    Rows are chosen and rejected in turn, their masks on the token that is scored; each brings the number `margin`.
    """

    loss: Callable[..., Tensor]
    center_coef: float = 0.0

    needs = frozenset({"score_cur"})
    coupled = False
    needs_signal = None
    against = MappingProxyType({})

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        known = _sides(columns)
        out = {"preference": _losses(self.loss, known, known["score_chosen"]).sum() / counts.num_units}
        if self.center_coef:
            out["center"] = self.center_coef * centering(known["score_chosen"], known["score_rejected"]).sum() / counts.num_units
        return out

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        known = _sides(columns)
        chosen, rejected = known["score_chosen"], known["score_rejected"]
        tally.add("train/score_chosen_mean", chosen.sum(), len(chosen))
        tally.add("train/score_rejected_mean", rejected.sum(), len(rejected))
        in_order = prefers_chosen(chosen, rejected).sum() + 0.5 * (chosen == rejected).sum()      # a tie counts half
        tally.add("train/preference_accuracy_frac", in_order, len(chosen))


@dataclass(frozen=True, slots=True)
class RatedScores:
    """The mean of loss(score, target) over all ratings that are known, of `outputs` objectives.

    Rows have their masks on the token that is scored and bring the numbers rating_k, known_k (1 or 0) and their sum, num_ratings.
    """

    loss: Callable[..., Tensor]
    outputs: int = 1

    needs = frozenset({"score_cur"})
    coupled = False
    needs_signal = None
    against = MappingProxyType({})

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        known = self._known(columns)
        loss = _losses(self.loss, known, known["score"])
        return {"rating": masked(loss, known["mask"]).sum() / max(counts.totals["num_ratings"], 1)}

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        known = self._known(columns)
        count = int(known["mask"].sum())
        tally.add("train/rating_error_mean", masked(known["score"] - known["target"], known["mask"]).abs().sum(), count)
        tally.add("train/score_mean", masked(known["score"], known["mask"]).sum(), count)

    def _known(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        score = _at_end(columns)
        of = lambda name: torch.stack([columns[f"{name}_{k}"] for k in range(self.outputs)], -1).view(score.shape)  # noqa: E731
        mask = of("known") > 0.5
        return {"score": score, "target": masked(of("rating"), mask), "mask": mask}


@dataclass(frozen=True, slots=True)
class ClassScores:
    """The mean of loss(score, label, thresholds) over answers; the thresholds are trained with the model.

    Rows have their masks on the token that is scored and bring the number `label`. thresholds() -> [K-1], increasing.
    """

    loss: Callable[..., Tensor]
    thresholds: Callable[[], Tensor]

    needs = frozenset({"score_cur"})
    coupled = False
    needs_signal = None
    against = MappingProxyType({})

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        known = self._known(columns)
        return {"class": _losses(self.loss, known, known["score"]).sum() / counts.num_units}

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        """The class that the model gives is its median: as many thresholds lie below the score."""
        known = self._known(columns)
        given = (known["score"][:, None] > known["thresholds"]).sum(-1)
        tally.add("train/label_accuracy_frac", (given == known["label"]).sum(), len(given))
        tally.add("train/score_mean", known["score"].sum(), len(given))

    def _known(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"score": _at_end(columns), "label": columns["label"].long(), "thresholds": self.thresholds()}


@dataclass(frozen=True, slots=True)
class StepScores:
    """reduce(loss(logits, label)) over the ends of steps, where the masks are; rows bring the column `label`."""

    loss: Callable[..., Tensor]
    reduce: Callable[..., Tensor]

    needs = frozenset({"score_cur"})
    coupled = False
    needs_signal = None
    against = MappingProxyType({})

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        known = self._known(columns)
        loss = _losses(self.loss, known, columns["mask"])
        return {"step": self.reduce(loss, columns["mask"], **counts.of_reduce)}

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        known, mask = self._known(columns), columns["mask"]
        right = known["logits"].argmax(-1) == known["label"]
        tally.add("train/step_accuracy_frac", (right & mask).sum(), int(mask.sum()))

    def _known(self, columns: Mapping[str, Tensor]) -> dict[str, Any]:
        label = torch.where(columns["mask"], columns["label"].long(), IGNORE_LABEL)
        return {"logits": columns["score_cur"], "label": label, "ignore_label": IGNORE_LABEL}


@torch.no_grad()
def measure_scores(model: Any, batch: Batch, objective: Objective, *, tokens_per_micro_batch: int) -> dict[str, float]:
    """The loss over all rows of the batch and what the objective measures, as metrics of held-out answers.

    The same for any split. Nothing for an empty batch.
    """
    counts, tally, loss = Counts.of(batch.rows, rows_per_unit=batch.rows_per_unit), Tally(), 0.0
    if not batch.rows:
        return {}
    sized = {"tokens_per_micro_batch": tokens_per_micro_batch, "rows_per_unit": batch.rows_per_unit}
    for index in micro_batches(batch.rows, **sized):
        rows = collate(batch.rows, index, device=model.device)
        computed = score(model, rows, Sampling(), needs=objective.needs)
        columns = {**rows.numbers, **rows.given, **computed, "mask": rows.mask_BT}
        loss += sum(float(value) for value in objective.terms(columns, counts).values())
        objective.measure(columns, tally)
    return {"eval/loss": loss, **{name.replace("train/", "eval/", 1): value for name, value in tally.values().items()}}


def _at_end(columns: Mapping[str, Tensor]) -> Tensor:
    """The one score of each row, at its mask. [B,T] or [B,T,K] -> [B] or [B,K]"""
    return columns["score_cur"].sum(1)


def _sides(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    score = _at_end(columns)
    return {"score_chosen": score[0::2], "score_rejected": score[1::2], "margin": columns["margin"][0::2]}


def _losses(loss: Callable[..., Tensor], known: Mapping[str, Any], like: Tensor) -> Tensor:
    """The loss of what it asks for by name: one number for each of `like`."""
    names = inspect.signature(loss).parameters.keys() - getattr(loss, "keywords", {}).keys()
    value = loss(**{name: known[name] for name in names & known.keys()})
    if value.shape != like.shape:
        raise ShapeError(
            f"reward_model.loss returned the shape {tuple(value.shape)} where {tuple(like.shape)} are scored; it gives one number for each "
            "and takes no mean or sum: the trainer does, with the counts of the whole step"
        )
    return value
