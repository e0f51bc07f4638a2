"""The update: loss, reduction with whole-step counts, backward, clip, optimizer. The only backward() there is."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from burnish.algorithms.penalties import k3, kl_loss
from burnish.config import Sampling
from burnish.trainer.columns import COLUMNS, MicroBatch, collate, micro_batches, score, score_rows
from burnish.trainer.state import TrainState
from burnish.types import Batch, Row

Progress = Callable[[int, int], None]


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


class ShapeError(ValueError):
    """A loss that does not return one number per token."""


class NothingMovedError(RuntimeError):
    """An update with a gradient and a learning rate left every weight as it was."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The functions of one algorithm. `kl` holds estimator and gradient where a KL loss is added to the policy loss."""

    loss: Callable[..., Tensor]
    reduce: Callable[..., Tensor]
    kl: Mapping[str, str] | None = None

    @property
    def only_advantages(self) -> bool:
        """Without an advantage there is nothing to learn: no KL loss, and the loss takes adv and no entropy."""
        return self.kl is None and "adv" in self.columns and "entropy" not in self.columns

    @property
    def columns(self) -> set[str]:
        """What the loss asks for, by the names of its arguments."""
        return set(inspect.signature(self.loss).parameters) & set(COLUMNS)


@dataclass(slots=True)
class Tally:
    """Sums and counts, pooled over micro-batches, so that a metric does not depend on the split."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: Tensor | float, count: float) -> None:
        self.sums[name] += float(total)
        self.counts[name] += count

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(value, self.peaks.get(name, value))

    def values(self) -> dict[str, float]:
        return {name: self.sums[name] / count for name, count in self.counts.items() if count} | self.peaks


def train_step(
    state: TrainState,
    batch: Batch,
    algo: Algorithm,
    *,
    sampling: Sampling,
    lr_of: Callable[[int], float],
    clip_norm: float,
    epochs: int = 1,
    minibatches: int = 1,
    tokens_per_micro_batch: int = 4096,
    max_skipped: int = 3,
    seed: int = 0,
    dropout: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """All updates on the rollouts of one step, epochs x minibatches of them. Changes `state`, returns metrics.

    `sampling` is what the rollouts were drawn with; `lr_of(update)` counts from 1.
    A batch in which no row has an advantage makes no update, unless the loss has something else to go by.
    """
    sized = {"sampling": sampling, "tokens_per_micro_batch": tokens_per_micro_batch}
    rows = batch.rows
    if not rows or (algo.only_advantages and all(row.adv == 0 for row in rows)):
        state.updates += epochs * minibatches
        return {"train/rollouts_count": 0, "train/tokens_count": 0}
    prox = score_rows(state.policy, rows, **sized) if "logp_prox" in algo.columns else None
    tally, done, skipped_before = Tally(), 0, state.skipped
    trained: list[Row] = []
    total = epochs * len(micro_batches(rows, tokens_per_micro_batch=tokens_per_micro_batch))
    state.policy.module.train(dropout)
    for epoch in range(epochs):
        for part in _parts(len(rows), minibatches, seed=(seed, state.step, epoch)):
            state.updates += 1
            if not part:
                continue
            if dropout:
                torch.manual_seed((seed * 1_000_003 + state.updates) % 2**63)
            first = state.updates % (epochs * minibatches) == 1 or epochs * minibatches == 1
            finite = True
            chosen = [rows[i] for i in part]
            chosen_prox = [prox[i] for i in part] if prox else None
            for micro in _gradients(state, chosen, chosen_prox, algo, tally, first=first, **sized):
                finite = micro
                done += 1
                if progress:
                    progress(min(done, total), total)
            if _apply(state, finite, tally, lr=lr_of(state.updates), clip_norm=clip_norm, max_skipped=max_skipped) and epoch == 0:
                trained += chosen
    state.policy.module.eval()
    return {
        **tally.values(), "train/lr": lr_of(state.updates), "train/rollouts_count": len(trained),
        "train/tokens_count": sum(sum(row.sampled) for row in trained), "train/skipped_updates_count": state.skipped - skipped_before,
    }


def _parts(num_rows: int, minibatches: int, *, seed: tuple[int, ...]) -> list[list[int]]:
    """Rows of each update of one pass; shuffled where there are several. May hold empty parts."""
    order = np.arange(num_rows) if minibatches == 1 else np.random.default_rng(seed).permutation(num_rows)
    return [part.tolist() for part in np.array_split(order, minibatches)]


def _gradients(
    state: TrainState,
    rows: Sequence[Row],
    prox: Sequence[Sequence[float]] | None,
    algo: Algorithm,
    tally: Tally,
    *,
    first: bool,
    sampling: Sampling,
    tokens_per_micro_batch: int,
):
    """Add up the gradients of one update. Yields after each micro-batch whether its loss was finite, and ends where not."""
    lengths = [sum(row.sampled) for row in rows]
    counts = {"num_tokens": sum(lengths), "num_rollouts": sum(n > 0 for n in lengths)}
    total_loss = 0.0
    for index in micro_batches(rows, tokens_per_micro_batch=tokens_per_micro_batch):
        batch = collate(rows, index, device=state.policy.device, prox=prox)
        logp_BT, entropy_BT = score(state.policy, batch, sampling, entropy_grad="entropy" in algo.columns)
        columns = {**batch.given, "logp_cur": logp_BT, "entropy": entropy_BT, "mask": batch.mask_BT}
        loss_BT = algo.loss(**{name: columns[name] for name in algo.columns})
        if loss_BT.shape != batch.mask_BT.shape:
            raise ShapeError(
                f"the loss returned the shape {tuple(loss_BT.shape)} for columns of the shape {tuple(batch.mask_BT.shape)}; a loss gives "
                "one number per token and takes no mean or sum: algo.reduce does, with the counts of the whole step"
            )
        loss = algo.reduce(loss_BT, batch.mask_BT, **counts)
        if algo.kl is not None:
            kl_BT = kl_loss(logp_BT, columns["logp_gen"], columns["logp_ref"], **algo.kl)
            loss = loss + state.kl.coef * algo.reduce(kl_BT, batch.mask_BT, **counts)
        if not torch.isfinite(loss):
            yield False
            return
        loss.backward()
        state.weights.collect_grads()
        total_loss += float(loss.detach())
        _measure(tally, batch, columns, algo, first=first)
        yield True
    tally.add("train/loss", total_loss, 1)


@torch.no_grad()
def _measure(tally: Tally, batch: MicroBatch, columns: Mapping[str, Tensor], algo: Algorithm, *, first: bool) -> None:
    count = int(batch.mask_BT.sum())
    tally.add("train/entropy_nats", columns["entropy"].sum(), count)
    if first:
        tally.add("train/kl_cur_gen_nats", k3(columns["logp_gen"], columns["logp_cur"]).sum(), count)
    if "logp_ref" in columns:
        tally.add("train/kl_cur_ref_nats", k3(columns["logp_cur"], columns["logp_ref"]).sum(), count)
    inner = getattr(algo.loss, "func", algo.loss)
    if (clipped := getattr(inner, "clipped", None)) is not None:
        values = getattr(algo.loss, "keywords", {})
        hit_BT = clipped(**{name: columns[name] for name in algo.columns}, **values)
        tally.add("train/clip_frac", (hit_BT & batch.mask_BT).sum(), count)


def _apply(state: TrainState, finite: bool, tally: Tally, *, lr: float, clip_norm: float, max_skipped: int) -> bool:
    """Clip, step, publish; or skip the update where something was not finite. Tells whether there was an update."""
    norm = float(state.weights.grad_norm()) if finite else math.nan
    if not math.isfinite(norm):
        state.weights.clear_grads()
        state.skipped += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= max_skipped:
            what = "gradient" if finite else "loss"
            raise NonFiniteError(
                f"update {state.updates}: the {what} is not finite, now for {state.skipped_in_a_row} updates in a row; no weight "
                "was changed by them. Lower optim.lr or optim.clip_norm, or look at the rollouts of this step for what is special"
            )
        return False
    state.skipped_in_a_row = 0
    tally.peak("train/grad_norm", norm)
    masters = [m for m in state.weights.masters.values() if m.grad is not None]
    if norm > clip_norm:
        torch._foreach_mul_([m.grad for m in masters], clip_norm / (norm + 1e-6))
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    probe = _Probe(masters) if lr > 0 and norm > 0 else None
    state.optimizer.step()
    if not math.isfinite(float(torch.nn.utils.get_total_norm(masters))):
        raise NonFiniteError(f"update {state.updates} made weights that are not finite, with the learning rate {lr:.3g}; lower optim.lr")
    state.weights.publish()
    state.version += 1
    if probe is not None and not probe.moved():
        raise NothingMovedError(
            f"update {state.updates} moved no weight although the gradient's length is {norm:.3g} and the learning rate {lr:.3g}: "
            "the step is smaller than float32 can add; raise optim.lr"
        )
    state.weights.clear_grads()
    return True


class _Probe:
    """Of each tensor the weight nearest to 0 that has a gradient, before and after: if any moves, it does, float32 being finest there."""

    def __init__(self, masters: Sequence[Tensor]) -> None:
        self.masters = masters
        self.at = [int(torch.where(m.grad != 0, m.detach().abs(), math.inf).argmin()) for m in masters]
        self.before = self._values()

    def _values(self) -> list[float]:
        return [m.detach().view(-1)[i].item() for m, i in zip(self.masters, self.at, strict=True)]

    def moved(self) -> bool:
        return self._values() != self.before
