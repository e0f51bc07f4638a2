"""Objectives of given tokens: losses of written answers, and divergences of whole distributions from teachers; both as held-out means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burnish.config import Sampling
from burnish.trainer.columns import Against, collate, micro_batches, score
from burnish.trainer.objective import Counts, ShapeError, Tally
from burnish.types import Row

Reduce = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """reduce(loss(logp_cur)) over the tokens of the mask."""

    loss: Callable[..., Tensor]
    reduce: Reduce

    needs = frozenset({"logp_cur"})
    coupled = False
    needs_signal = None

    @property
    def against(self) -> Mapping[str, Against]:
        return {}

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        loss, mask = self.loss(logp_cur=columns["logp_cur"]), columns["mask"]
        if loss.shape != mask.shape:
            raise ShapeError(
                f"sft.loss returned the shape {tuple(loss.shape)} for log-probs of the shape {tuple(mask.shape)}; it gives one number "
                "per token and takes no mean or sum: sft.reduce does, with the counts of the whole step"
            )
        return {"tokens": self.reduce(loss, mask, **counts.of_reduce)}

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        tally.add("train/nll_nats", -columns["logp_cur"].sum(), int(columns["mask"].sum()))


@dataclass(frozen=True, slots=True)
class DivergenceObjective:
    """reduce(sum_k w_k D(cur, teacher k)) over the tokens of the mask, D over the whole vocabulary where each token is predicted."""

    teachers: Against
    reduce: Reduce

    needs = frozenset()
    coupled = False
    needs_signal = None

    @property
    def against(self) -> Mapping[str, Against]:
        return {"divergence": self.teachers}

    def terms(self, columns: Mapping[str, Tensor], counts: Counts) -> dict[str, Tensor]:
        return {"divergence": self.reduce(columns["divergence"], columns["mask"], **counts.of_reduce)}

    @torch.no_grad()
    def measure(self, columns: Mapping[str, Tensor], tally: Tally) -> None:
        count = int(columns["mask"].sum())
        tally.add("train/divergence_nats", columns["divergence"].sum(), count)
        tally.add("train/nll_nats", -columns["logp_cur"].sum(), count)


def against_teachers(models: Sequence[Any], weights: Sequence[float], divergence: Callable[..., Tensor], *, temperature: float) -> Against:
    """A column of divergence(logits_cur, logits_teach, temperature) [n,V], [n,V] -> [n] from each model, weighed.

    Of models that pad their vocabulary to unequal sizes, the tokens that both have are compared.
    """
    return Against(models, weights, partial(_compare, divergence, temperature=temperature))


def _compare(divergence: Callable[..., Tensor], cur: Tensor, teach: Tensor, *, temperature: float) -> Tensor:
    width = min(cur.shape[-1], teach.shape[-1])
    value = divergence(logits_cur=cur[..., :width], logits_teach=teach[..., :width], temperature=temperature)
    if value.shape != cur.shape[:-1]:
        raise ShapeError(
            f"distill.divergence returned the shape {tuple(value.shape)} for logits of the shape {(*cur.shape[:-1], width)}; it sums over "
            "the vocabulary and gives one number per token: distill.reduce takes the mean"
        )
    return value


@torch.no_grad()
def token_means(
    model: Any, rows: Sequence[Row], *, tokens_per_micro_batch: int, against: Mapping[str, Against] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Means over all tokens of the masks, in nats: "nll" of the tokens themselves, and each column of `against` by its name.

    Every token weighs the same, however the rows are split. Nothing where no row has a token.
    """
    sums = dict.fromkeys(("nll", *(against or {})), 0.0)
    count = sum(row.num_tokens for row in rows)
    batches = micro_batches(rows, tokens_per_micro_batch=tokens_per_micro_batch)
    for done, index in enumerate(batches, start=1):
        columns = score(model, collate(rows, index, device=model.device), Sampling(), needs=("logp_cur",), against=against)
        sums["nll"] -= float(columns["logp_cur"].double().sum())
        for name in against or {}:
            sums[name] += float(columns[name].double().sum())
        if progress:
            progress(done, len(batches))
    return {name: total / count for name, total in sums.items()} if count else {}
