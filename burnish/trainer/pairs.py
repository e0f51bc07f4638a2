"""Preference objectives: mixtures of losses over pairs of answers, or over single answers that were wanted or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.preference_losses import kto_baseline
from burnish.algorithms.preference_terms import RunningReward, length_desensitized, likelihood_weight, rewards_of, sequence_logprob
from burnish.trainer.columns import Against
from burnish.trainer.objective import Counts, ShapeError, Tally

PAIR_COLUMNS = ("cur_chosen", "cur_rejected", "ref_chosen", "ref_rejected", "tokens_chosen", "tokens_rejected", "num_pairs", "num_tokens")
"""What a loss of pairs may ask for: [P] each; num_pairs and num_tokens (of the chosen answers) are of the whole update."""
SINGLE_COLUMNS = ("cur", "ref", "desirable", "kl")
"""What a loss of single answers may ask for: [N] each, kl []."""


RUNNING = "train/pair_reward_mean"
"""Mean of the implied rewards of both answers, as the loss that takes the running delta sees them."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """weight * fn of the columns that it names, one number a pair or answer."""

    name: str
    fn: Callable[..., Tensor]
    weight: float = 1.0

    @property
    def bound(self) -> Mapping[str, Any]:
        return getattr(self.fn, "keywords", {})

    @property
    def columns(self) -> frozenset[str]:
        """What fn asks for by the names of its arguments."""
        return frozenset(inspect.signature(self.fn).parameters) - self.bound.keys()

    @property
    def coupled(self) -> bool:
        return getattr(getattr(self.fn, "func", self.fn), "coupled", False)

    def __call__(self, known: Mapping[str, Any], *, size: int) -> Tensor:
        value = self.fn(**{name: known[name] for name in self.columns & known.keys()})
        if value.shape != (size,):
            raise ShapeError(
                f"the loss {self.name} returned the shape {tuple(value.shape)} for {size} pairs or answers; a preference loss gives one "
                "number for each and takes no mean or sum: the trainer does, with the counts of the whole step"
            )
        return self.weight * value


@dataclass(frozen=True, slots=True)
class PairObjective:
    """The sum over pairs of a mixture of losses, divided by the number of pairs; rows are chosen and rejected in turn.

    beside: a term on the chosen answers' plain log-probs that the weights and length_alpha leave alone (`nll`). length_alpha:
    `length_desensitized`, in policy and reference. weigh_by_policy: `likelihood_weight` on the losses. Without with_reference the
    log-probs of the reference are 0. running: where a loss takes its delta from.
    """

    losses: tuple[LossTerm, ...]
    beside: LossTerm | None = None
    length_alpha: float | None = None
    weigh_by_policy: bool = False
    with_reference: bool = True
    running: RunningReward | None = None

    needs_signal = None

    @property
    def coupled(self) -> bool:
        return any(term.coupled for term in self.losses)

    @property
    def needs_reference(self) -> bool:
        return self.with_reference and any({"ref_chosen", "ref_rejected"} & term.columns for term in self.losses)

    @property
    def needs(self) -> frozenset[str]:
        needs = {"logp_cur", "logp_ref"} if self.needs_reference else {"logp_cur"}
        return frozenset({*needs, "logp_expected"} if self.weigh_by_policy else needs)

    @property
    def against(self) -> Mapping[str, Against]:
        return {}

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        whole = {"num_pairs": counts.num_units, "num_tokens": counts.tokens_by_place[0]}
        known = self._pairs(columns, self.length_alpha) | whole
        if self.running is not None:
            known["delta"] = self.running.mean
        size = len(known["cur_chosen"])
        weight = self._weight(columns)
        values = [(term.name, term(known, size=size)) for term in self.losses]
        values = [(name, value if weight is None else weight * value) for name, value in values]
        if self.beside is not None:
            values.append((self.beside.name, self.beside(self._pairs(columns, None) | whole, size=size)))
        return _sums(values, counts.num_units)

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        """Implied rewards as the first of the losses sees them: with its beta, and a token where it compares means of tokens."""
        pairs, size = self._pairs(columns, None), len(columns["mask"]) // 2
        beta = self.losses[0].bound.get("beta", 1.0)
        per_token = "tokens_chosen" in self.losses[0].columns and self.losses[0].bound.get("length_normalize", True)
        rewards = {}
        for side in ("chosen", "rejected"):
            reward = rewards_of(pairs[f"cur_{side}"], pairs[f"ref_{side}"], beta=beta)
            rewards[side] = reward / pairs[f"tokens_{side}"].clamp(min=1) if per_token else reward
            tally.add(f"train/reward_{side}_mean", rewards[side].sum(), size)
            tally.add(f"train/logp_{side}_nats", pairs[f"cur_{side}"].sum(), size)
        margin = rewards["chosen"] - rewards["rejected"]
        tally.add("train/preference_margin", margin.sum(), size)
        tally.add("train/preference_accuracy_frac", _positive_share(margin), size)
        if (weight := self._weight(columns)) is not None:
            tally.add("train/pair_weight_mean", weight.sum(), size)
        if self.running is not None:
            term = next(t for t in self.losses if "delta" in t.columns)
            known = self._pairs(columns, self.length_alpha)
            sides = [rewards_of(known[f"cur_{x}"], known[f"ref_{x}"], beta=term.bound["beta"]) for x in ("chosen", "rejected")]
            tally.add(RUNNING, 0.5 * sum(sides).sum(), size)

    def _pairs(self, columns: Mapping[str, Tensor], alpha: float | None) -> dict[str, Tensor]:
        """[2P,T] columns -> [P] sums of chosen and rejected answers."""
        masks = columns["mask"][0::2], columns["mask"][1::2]
        known = {}
        for name, logp in (("cur", columns["logp_cur"]), ("ref", _reference(columns, self.needs_reference))):
            for side, at in (("chosen", 0), ("rejected", 1)):
                mask = masks[at]
                value = logp[at::2]
                known[f"{name}_{side}"] = (
                    sequence_logprob(value, mask) if alpha is None else length_desensitized(value, mask, masks[1 - at], alpha=alpha)
                )
        return known | {"tokens_chosen": masks[0].sum(-1), "tokens_rejected": masks[1].sum(-1)}

    def _weight(self, columns: Mapping[str, Tensor]) -> Tensor | None:
        if not self.weigh_by_policy:
            return None
        pairs = self._pairs(columns, None)
        for side, at in (("chosen", 0), ("rejected", 1)):
            pairs[f"expected_{side}"] = sequence_logprob(columns["logp_expected"][at::2], columns["mask"][at::2])
        names = [f"{what}_{side}" for what in ("cur", "expected", "tokens") for side in ("chosen", "rejected")]
        return likelihood_weight(**{name: pairs[name] for name in names})


@dataclass(frozen=True, slots=True)
class SingleObjective:
    """The sum over answers of a mixture of losses, divided by the number of answers.

    Rows are an answer and, in turn, the same prompt with the answer of another one, for `kto_baseline`; the number `wanted` of a row
    tells 1 or 0. Without with_reference the log-probs of the reference are 0.
    """

    losses: tuple[LossTerm, ...]
    with_reference: bool = True

    coupled = True
    rows_without_gradient = True
    needs_signal = None

    @property
    def needs_reference(self) -> bool:
        return self.with_reference

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp_cur", "logp_ref"} if self.needs_reference else {"logp_cur"})

    @property
    def against(self) -> Mapping[str, Against]:
        return {}

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        known = self._answers(columns)
        return _sums([(term.name, term(known, size=len(known["cur"]))) for term in self.losses], counts.num_units)

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        """An answer is on the right side where it gained more than the baseline and was wanted, or less and was not."""
        known = self._answers(columns)
        reward = rewards_of(known["cur"], known["ref"], beta=(beta := self.losses[0].bound.get("beta", 1.0)))
        wanted = known["desirable"]
        for side, at in (("chosen", wanted), ("rejected", ~wanted)):
            tally.add(f"train/reward_{side}_mean", reward[at].sum(), int(at.sum()))
            tally.add(f"train/logp_{side}_nats", known["cur"][at].sum(), int(at.sum()))
        above = reward - beta * known["kl"]
        tally.add("train/preference_accuracy_frac", _positive_share(torch.where(wanted, above, -above)), len(reward))
        tally.add("train/kto_baseline_nats", known["kl"] * len(reward), len(reward))

    def _answers(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cur = sequence_logprob(columns["logp_cur"], columns["mask"])
        ref = sequence_logprob(_reference(columns, self.needs_reference), columns["mask"])
        return {
            "cur": cur[0::2], "ref": ref[0::2], "desirable": columns["wanted"][0::2] > 0.5, "kl": kto_baseline(cur[1::2], ref[1::2]),
        }


def _reference(columns: Mapping[str, Tensor], needed: bool) -> Tensor:
    return columns["logp_ref"] if needed else torch.zeros_like(columns["logp_cur"])


def _sums(values: Sequence[tuple[str, Tensor]], count: int) -> dict[str, Tensor]:
    """The shares by name; losses of one name are added up."""
    out: dict[str, Tensor] = {}
    for name, value in values:
        share = value.sum() / count
        out[name] = out[name] + share if name in out else share
    return out


def _positive_share(margin: Tensor) -> Tensor:
    """How many are above 0; one that is 0 counts half."""
    return (margin > 0).sum() + 0.5 * (margin == 0).sum()
