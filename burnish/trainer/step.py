"""The update: loss, reduction with whole-step counts, backward, clip, optimizer. The only backward() there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from burnish.algorithms.corrections import interpolated_prox
from burnish.algorithms.penalties import k3
from burnish.config import Sampling
from burnish.trainer.algorithm import effective_samples
from burnish.trainer.columns import COMPUTED, MicroBatch, collate, micro_batches, score, score_rows
from burnish.trainer.objective import Counts, Objective, Tally
from burnish.trainer.state import TrainState
from burnish.types import Batch, Row

Progress = Callable[[int, int], None]
Objectives = Mapping[str, Objective]


PROBED_UPDATES = 20
"""Whether an update moves a weight is looked at for the first ones, and now and then: it costs a pass over all weights."""


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


class NothingMovedError(RuntimeError):
    """An update with a gradient and a learning rate left every weight as it was."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    sampling: Sampling
    tokens_per_micro_batch: int
    rows_per_unit: int
    dropout_seed: int | None


def train_step(
    state: TrainState,
    batch: Batch,
    algo: Objective | Objectives,
    *,
    sampling: Sampling,
    lr_of: Callable[[int], float],
    clip_norm: float,
    epochs: int = 1,
    minibatches: int = 1,
    tokens_per_micro_batch: int = 4096,
    max_skipped: int = 3,
    stop_at_kl_nats: float | None = None,
    seed: int = 0,
    dropout: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """All updates on the rows of one step, epochs x minibatches of them. Changes `state`, returns metrics.

    algo: one objective for all rows, or several by the name that a row's `algo` gives. `sampling` is what the rows were drawn with;
    `lr_of(update)` counts from 1. An update that finds the policy, by the mean of k3 over its tokens, further than stop_at_kl_nats from
    where the step began is left out, with all that would follow it in the step.
    A batch in which no row has a signal (an advantage) makes no update, unless the objective has something else to go by.
    ValueError where a row's algorithm is not given, and where stop_at_kl_nats is and no objective needs logp_prox.
    """
    objectives: Objectives = algo if isinstance(algo, Mapping) else {"": algo}
    if stop_at_kl_nats is not None and not any("logp_prox" in objective.needs for objective in objectives.values()):
        raise ValueError("stop_at_kl_nats measures the distance to logp_prox, which no loss or correction here needs; leave it out")
    if unknown := {row.algo for row in batch.rows} - objectives.keys():
        raise ValueError(f"rows are of the algorithm {min(unknown)!r}, and objectives are given for {sorted(objectives)}")
    rows = list(batch.rows)
    planned = state.updates + epochs * minibatches
    if not any(_has_signal(row, objectives[row.algo]) for row in rows):
        state.updates = planned
        return {"train/rollouts_count": 0, "train/tokens_count": 0}
    sized = {"sampling": sampling, "tokens_per_micro_batch": tokens_per_micro_batch}
    rows = _with_prox(state, rows, objectives, minibatches=minibatches, **sized)
    tally, done, skipped_before, trained, version, lr = Tally(), 0, state.skipped, [], state.version, {}
    total = epochs * len(micro_batches(rows, tokens_per_micro_batch=tokens_per_micro_batch, rows_per_unit=batch.rows_per_unit))
    state.policy.module.train(dropout)
    for epoch in range(epochs):
        for part in _parts(len(rows) // batch.rows_per_unit, minibatches, seed=(seed, state.step, epoch)):
            state.updates += 1
            if not part:
                continue
            places = [u * batch.rows_per_unit + i for u in part for i in range(batch.rows_per_unit)]
            update = _Update(
                state, [rows[i] for i in places], objectives, tally, first=state.updates == planned - epochs * minibatches + 1,
                version_prox=version, sizes=_Sizes(**sized, rows_per_unit=batch.rows_per_unit, dropout_seed=seed if dropout else None),
            )
            finite = True
            for micro in update.gradients():
                finite = micro
                done += 1
                if progress:
                    progress(min(done, total), total)
            for place, row in zip(places, update.rows, strict=True):
                rows[place] = row
            if stop_at_kl_nats is not None and update.kl_prox_nats > stop_at_kl_nats:
                tally.peak("train/stopped_updates_count", planned - state.updates + 1)
                state.weights.clear_grads()
                state.updates = planned
                break
            lr["train/lr"] = lr_of(state.updates)
            moved = _apply(state, finite, tally, lr=lr["train/lr"], clip_norm=clip_norm, max_skipped=max_skipped)
            if moved and epoch == 0:
                trained += update.rows
        if state.updates == planned:
            break
    state.policy.module.eval()
    return {
        **effective_samples(tally), **tally.values(), **lr, "train/rollouts_count": len(trained),
        "train/tokens_count": sum(row.num_tokens for row in trained), "train/skipped_updates_count": state.skipped - skipped_before,
    }


def _has_signal(row: Row, objective: Objective) -> bool:
    name = objective.needs_signal
    return row.num_tokens > 0 and (name is None or any(v != 0 for v, m in zip(row.columns.get(name, ()), row.mask, strict=False) if m))


def _with_prox(
    state: TrainState, rows: list[Row], objectives: Objectives, *, minibatches: int, **sized: object
) -> list[Row]:
    """Rows with logp_prox where it has to be known before the first update.

    In a step whose passes are one update each, the first pass itself gives it.
    """
    wants = {name: o for name, o in objectives.items() if "logp_prox" in o.needs}
    scored = {name for name, o in wants.items() if getattr(o, "prox", "scored") == "scored"}
    ahead = {name for name, o in wants.items() if (c := getattr(o, "correction", None)) is not None and c.looks_ahead}
    rows = [row.put(logp_prox=row.columns["logp_gen"]) if row.algo in wants.keys() - scored else row for row in rows]
    chosen = [i for i, row in enumerate(rows) if row.algo in (scored if minibatches > 1 else scored & ahead)]
    prox = score_rows(state.policy, [rows[i] for i in chosen], **sized)
    for i, logp in zip(chosen, prox, strict=True):
        rows[i] = rows[i].put(logp_prox=logp)
    for name in ahead:
        places = [i for i, row in enumerate(rows) if row.algo == name]
        weighed = objectives[name].look_ahead([rows[i] for i in places], [rows[i].columns["logp_prox"] for i in places])
        for i, row in zip(places, weighed, strict=True):
            rows[i] = row
    return rows


def _parts(num_units: int, minibatches: int, *, seed: tuple[int, ...]) -> list[list[int]]:
    """Units of each update of one pass; shuffled where there are several. May hold empty parts."""
    order = np.arange(num_units) if minibatches == 1 else np.random.default_rng(seed).permutation(num_units)
    return [part.tolist() for part in np.array_split(order, minibatches)]


class _Update:
    """The gradient of one update, added up over micro-batches; `rows` come out with the log-probs that the first pass gave them."""

    def __init__(
        self, state: TrainState, rows: list[Row], objectives: Objectives, tally: Tally, *, first: bool, version_prox: int, sizes: _Sizes
    ) -> None:
        self.state, self.rows, self.objectives, self.tally, self.first, self.sizes = state, rows, objectives, tally, first, sizes
        self.version_prox = version_prox
        self.counts = Counts.of(rows, rows_per_unit=sizes.rows_per_unit)
        self.kl_prox_nats = 0.0
        self.losses: dict[str, float] = {}

    def gradients(self) -> Iterator[bool]:
        """Yields after each micro-batch whether its loss was finite, and ends where not."""
        kl_sum = kl_count = 0.0
        for name, objective in self.objectives.items():
            places = [i for i, row in enumerate(self.rows) if row.algo == name]
            batches = [[places[i] for i in index] for index in self._micro_batches(places)]
            looks_twice = objective.coupled and (len(batches) > 1 or getattr(objective, "rows_without_gradient", False))
            gradient_of = self._coupled(batches, objective, name) if looks_twice and places else None
            if gradient_of is not None:
                batches = self._with_gradient(places, gradient_of)
            for index in batches:
                columns = self._columns(index, objective)
                if gradient_of is None:
                    terms = objective.terms(columns, self.counts)
                    self._measure(columns, objective, name)
                    loss = torch.stack(list(terms.values())).sum()
                    self._note(terms)
                else:
                    loss = _surrogate(columns, gradient_of, index)
                if not torch.isfinite(loss):
                    yield False
                    return
                if loss.requires_grad:
                    loss.backward()
                    self.state.weights.collect_grads()
                if "logp_cur" in columns and "logp_prox" in columns:
                    mask = columns["mask"]
                    kl_sum += float(torch.where(mask, k3(columns["logp_prox"], columns["logp_cur"].detach()), 0.0).sum())
                    kl_count += int(mask.sum())
                yield True
        self.kl_prox_nats = kl_sum / kl_count if kl_count else 0.0
        if kl_count:
            self.tally.peak("train/kl_cur_prox_nats", self.kl_prox_nats)
        for name, value in self.losses.items():
            self.tally.add("train/loss" if name == "" else f"train/loss_{name}", value, 1)

    def _micro_batches(self, places: Sequence[int]) -> list[list[int]]:
        return micro_batches(
            [self.rows[i] for i in places], tokens_per_micro_batch=self.sizes.tokens_per_micro_batch, rows_per_unit=self.sizes.rows_per_unit
        )

    def _with_gradient(self, places: Sequence[int], gradient_of: Mapping[str, Mapping[int, Tensor]]) -> list[list[int]]:
        """Micro-batches of the rows that have a gradient at all."""
        moved = [i for i in places if any(bool(by_row[i].any()) for by_row in gradient_of.values())]
        sizes = {"tokens_per_micro_batch": self.sizes.tokens_per_micro_batch}
        return [[moved[i] for i in index] for index in micro_batches([self.rows[i] for i in moved], **sizes)]

    def _columns(self, index: Sequence[int], objective: Objective) -> dict[str, Tensor]:
        """All that the objective asks for, of the rows at `index`."""
        if self.sizes.dropout_seed is not None:
            torch.manual_seed((self.sizes.dropout_seed * 1_000_003 + self.state.updates * 8191 + index[0]) % 2**63)
        batch = collate(self.rows, index, device=self.state.policy.device)
        wanted = objective.needs & set(COMPUTED)
        computed = score(
            self.state.policy, batch, self.sizes.sampling, needs=wanted | {"entropy"} if "logp_cur" in wanted else wanted,
            entropy_grad="entropy" in objective.needs, against=objective.against,
            values_detached=getattr(objective, "values_detached", False),
        )
        columns = {**batch.numbers, **batch.given, **computed, "mask": batch.mask_BT}
        if "logp_prox" in objective.needs:
            self._prox(columns, batch, objective)
        return columns

    def _prox(self, columns: dict[str, Tensor], batch: MicroBatch, objective: Objective) -> None:
        if getattr(objective, "prox", "scored") == "interpolated":
            version = columns["version"].long()[:, None].expand_as(columns["mask"])
            columns["logp_prox"], _ = interpolated_prox(
                columns["logp_cur"].detach(), columns["logp_gen"], version, columns["mask"], version_cur=self.state.version,
                version_prox=self.version_prox,
            )
        elif "logp_prox" not in columns:
            columns["logp_prox"] = columns["logp_cur"].detach()
            for b, i in enumerate(batch.index):
                row = self.rows[i]
                self.rows[i] = row.put(logp_prox=tuple(columns["logp_prox"][b, : len(row.tokens)].tolist()))

    def _coupled(self, batches: Sequence[Sequence[int]], objective: Objective, algo: str) -> dict[str, dict[int, Tensor]]:
        """The loss's gradient with respect to what the model gives for each row, from a first look at all rows together.

        The second look, micro-batch by micro-batch, brings it into the weights (Gao et al. 2021, arXiv:2101.06983).
        """
        with torch.no_grad():
            seen = [self._columns(index, objective) for index in batches]
        order = sorted((i, m, b) for m, index in enumerate(batches) for b, i in enumerate(index))
        length = max(columns["mask"].shape[1] for columns in seen)
        whole: dict[str, Tensor] = {}
        for name, first in seen[0].items():
            per_token = first.dim() >= 2
            whole[name] = torch.stack([
                torch.nn.functional.pad(
                    seen[m][name][b], (0, 0) * (first.dim() - 2) + (0, length - seen[m][name].shape[1])
                ) if per_token else seen[m][name][b]
                for _, m, b in order
            ])
        leaves = {name: whole[name].requires_grad_() for name in COMPUTED if name in whole}
        terms = objective.terms(whole, self.counts)
        self._note(terms)
        self._measure(whole, objective, algo)
        loss = torch.stack(list(terms.values())).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        rows = [i for i, _, _ in order]
        return {name: dict(zip(rows, g, strict=True)) for name, g in zip(leaves, grads, strict=True) if g is not None}

    def _note(self, terms: Mapping[str, Tensor]) -> None:
        for name, value in terms.items():
            for key in ("", name) if len(terms) > 1 else ("",):
                self.losses[key] = self.losses.get(key, 0.0) + float(value.detach())

    @torch.no_grad()
    def _measure(self, columns: Mapping[str, Tensor], objective: Objective, algo: str) -> None:
        count = int(columns["mask"].sum())
        if "entropy" in columns:
            for of in ("", f"_{algo}") if algo else ("",):
                self.tally.add(f"train/entropy_nats{of}", columns["entropy"].sum(), count)
        if self.first and "logp_gen" in columns and "logp_cur" in columns:
            self.tally.add("train/kl_cur_gen_nats", k3(columns["logp_gen"], columns["logp_cur"]).sum(), count)
        objective.measure(columns, self.tally)


def _surrogate(columns: Mapping[str, Tensor], gradient_of: Mapping[str, Mapping[int, Tensor]], index: Sequence[int]) -> Tensor:
    """A sum with the gradient that the whole loss has for these rows."""
    parts = []
    for name, by_row in gradient_of.items():
        value = columns[name]
        grad = torch.stack([by_row[i][: value.shape[1]] for i in index]).to(value.dtype)
        parts.append((grad * value).sum())
    return torch.stack(parts).sum()


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
    watched = state.updates <= PROBED_UPDATES or state.updates % PROBED_UPDATES == 0
    probe = _Probe(masters) if watched and lr > 0 and norm > 0 else None
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
