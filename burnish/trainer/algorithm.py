"""The policy-gradient objective: a loss a token, its correction, its reduction; KL, entropy and value terms beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from burnish.algorithms.corrections import effective_sample_frac, normalize, weight_sums
from burnish.algorithms.penalties import KlController, k3, kl_loss
from burnish.algorithms.reduce import masked
from burnish.trainer.columns import COLUMNS, Against
from burnish.trainer.objective import Counts, ShapeError, Tally
from burnish.types import Row


@dataclass(frozen=True, slots=True)
class KlTerm:
    """coef * reduce(KL to the reference), beside the policy loss. estimator "exact" is over the whole vocabulary, against `models`."""

    estimator: str
    gradient: str
    control: KlController
    exact: Against | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights on the policy loss for the distance between the sampler and the policy at the start of the updates.

    fn(log_ratio, mask) -> (weight, kept), log_ratio = logp_prox - logp_gen. With `normalize` the weights have mean 1 over the
    step; with denominator "kept" dropped tokens do not count in the reduction of the policy loss. Both look at all rows before the
    first update.
    """

    fn: Callable[..., tuple[Tensor, Tensor]]
    normalize: bool = False
    denominator: str = "original"

    @property
    def looks_ahead(self) -> bool:
        return self.normalize or self.denominator == "kept"


@dataclass(slots=True)
class EntropyTerm:
    """-coef * reduce(entropy), beside the policy loss. `coef` may change from step to step."""

    coef: float


@dataclass(frozen=True, slots=True)
class ValueTerm:
    """coef * reduce(value loss), where the policy has a value head. only_head: the body gets no gradient from it."""

    loss: Callable[..., Tensor]
    coef: float
    only_head: bool = False


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The functions of one policy-gradient method.

    prox says where logp_prox comes from: "scored" from the policy at the start of the updates, "gen" from the sampler (ratios are
    then taken to the sampler itself), "interpolated" from both by their versions, without scoring for it.
    """

    loss: Callable[..., Tensor] | None
    reduce: Callable[..., Tensor]
    kl: KlTerm | None = None
    correction: Correction | None = None
    entropy: EntropyTerm | None = None
    value: ValueTerm | None = None
    prox: str = "scored"

    coupled = False

    def __post_init__(self) -> None:
        if self.prox == "interpolated" and self.correction is not None and self.correction.looks_ahead:
            raise ValueError("prox interpolated saves scoring the rows, which normalize and denominator kept need; use prox scored")

    @property
    def columns(self) -> frozenset[str]:
        """What the loss asks for, by the names of its arguments."""
        return frozenset(inspect.signature(self.loss).parameters) & set(COLUMNS) if self.loss else frozenset()

    @property
    def needs(self) -> frozenset[str]:
        needs = set(self.columns) | {"logp_cur"} if self.loss or self.kl else set()
        if self.correction:
            needs |= {"logp_prox", "logp_gen"}
        if self.prox != "scored" and "logp_prox" in needs:
            needs |= {"logp_gen"}
        if self.kl:
            needs |= {"logp_ref", "logp_gen"} if self.kl.exact is None else set()
        if self.entropy:
            needs |= {"entropy"}
        if self.value:
            needs |= {"value_cur", "value_prox", "ret"}
        return frozenset(needs)

    @property
    def against(self) -> Mapping[str, Against]:
        return {"divergence": self.kl.exact} if self.kl and self.kl.exact else {}

    @property
    def values_detached(self) -> bool:
        return self.value is not None and self.value.only_head

    @property
    def needs_signal(self) -> str | None:
        """Without an advantage there is nothing to learn, unless there is a KL, an entropy or a value term."""
        return "adv" if "adv" in self.columns and not (self.kl or self.entropy or self.value or "entropy" in self.columns) else None

    def look_ahead(self, rows: Sequence[Row], prox: Sequence[tuple[float, ...]]) -> list[Row]:
        """Rows with the correction's weight, normalised over the step, and what it keeps as columns."""
        weighed = []
        for row, logp in zip(rows, prox, strict=True):
            mask = torch.tensor([row.mask])
            ratio = torch.tensor([logp], dtype=torch.float64) - torch.tensor([row.columns["logp_gen"]], dtype=torch.float64)
            weighed.append(self.correction.fn(masked(ratio, mask), mask))
        sums = {"weight_sum": sum(float(weight.sum()) for weight, _ in weighed), "num_tokens": sum(row.num_tokens for row in rows)}
        out = []
        for row, (weight, kept) in zip(rows, weighed, strict=True):
            weight = normalize(weight, **sums) if self.correction.normalize else weight
            out.append(row.put(weight=tuple(weight[0].tolist()), kept=tuple(kept[0].double().tolist())))
        return out

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        mask, out = columns["mask"], {}
        total = partial(self.reduce, mask=mask, **counts.of_reduce)
        if self.loss is not None:
            weight, kept = self._weights(columns)
            if kept is not None and "adv" in columns:        # what is dropped must not be infinite: 0 * inf is no number
                columns = {**columns, "adv": masked(columns["adv"], kept)}
            loss = self.loss(**{name: columns[name] for name in self.columns})
            if getattr(loss, "shape", None) != mask.shape:
                found = f"the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise ShapeError(
                    f"the loss returned {found} for columns of the shape {tuple(mask.shape)}; a loss gives "
                    "one number per token and takes no mean or sum: algo.reduce does, with the counts of the whole step"
                )
            if weight is not None:
                loss = loss * weight
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise ShapeError("the loss has no gradient: it uses logp_cur or entropy only detached, so nothing would be learned")
            out["policy"] = self.reduce(loss, kept, **counts.of_kept) if self._counts_kept else total(loss)
        if self.kl is not None:
            out["kl"] = self.kl.control.coef * total(self._kl(columns))
        if self.entropy is not None:
            out["entropy"] = -self.entropy.coef * total(columns["entropy"])
        if self.value is not None:
            out["value"] = self.value.coef * total(
                self.value.loss(value_cur=columns["value_cur"], value_prox=columns["value_prox"], ret=columns["ret"])
            )
        return out

    @property
    def _counts_kept(self) -> bool:
        return self.correction is not None and self.correction.denominator == "kept"

    def _weights(self, columns: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        if self.correction is None:
            return None, None
        if "weight" in columns:
            return columns["weight"], columns["kept"] > 0
        log_ratio = masked(columns["logp_prox"] - columns["logp_gen"], columns["mask"])
        weight, kept = self.correction.fn(log_ratio, columns["mask"])
        return weight.detach(), kept

    def _kl(self, columns: Mapping[str, Tensor]) -> Tensor:
        if self.kl.exact is not None:
            return columns["divergence"]
        return kl_loss(
            columns["logp_cur"], columns["logp_gen"], columns["logp_ref"], estimator=self.kl.estimator, gradient=self.kl.gradient
        )

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        mask = columns["mask"]
        count = int(mask.sum())
        if "divergence" in columns:
            tally.add("train/kl_cur_ref_nats", columns["divergence"].sum(), count)
        elif "logp_ref" in columns and "logp_cur" in columns:
            tally.add("train/kl_cur_ref_nats", k3(columns["logp_cur"], columns["logp_ref"]).sum(), count)
        if "logp_teach" in columns:
            tally.add("train/kl_cur_teach_nats", k3(columns["logp_cur"], columns["logp_teach"]).sum(), count)
        inner = getattr(self.loss, "func", self.loss)
        if (clipped := getattr(inner, "clipped", None)) is not None:
            hit = clipped(**{name: columns[name] for name in self.columns}, **getattr(self.loss, "keywords", {}))
            tally.add("train/clip_frac", (hit & mask).sum(), count)
        if "value_cur" in columns and "ret" in columns:
            error = masked(columns["value_cur"] - columns["ret"], mask)
            tally.add("train/value_error", (error**2).sum(), count)
        weight, kept = self._weights(columns)
        if weight is not None:
            weight_sum, square_sum, _ = weight_sums(weight, mask)
            tally.add("train/correction_weight_mean", weight_sum, count)
            tally.add("train/correction_dropped_frac", (~kept & mask).sum(), count)
            tally.add(SQUARES, square_sum, count)


SQUARES = "_correction_weight_squares"


def effective_samples(tally: Tally) -> dict[str, float]:
    """The effective sample size of the correction's weights, from sums that were pooled over micro-batches; taken out of the tally."""
    count, squares = tally.counts.pop(SQUARES, 0), tally.sums.pop(SQUARES, 0.0)
    if not count:
        return {}
    total = tally.sums["train/correction_weight_mean"]
    return {"train/correction_ess_frac": effective_sample_frac(weight_sum=total, square_sum=squares, num_tokens=count)}

