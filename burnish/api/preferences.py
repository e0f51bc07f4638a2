"""Learn from preferences: written pairs, single wanted and unwanted answers, or the best and worst of the policy's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from burnish.algorithms.preference_losses import nll
from burnish.algorithms.preference_terms import RunningReward, best_and_worst
from burnish.api.answers import Encoder
from burnish.api.session import Place, Session
from burnish.config import Preference, Term
from burnish.plan.preferences import learns_from_single, takes_running_delta
from burnish.plan.preflight import ROOMS
from burnish.rollout import Kept, keep
from burnish.trainer import PAIR_COLUMNS, SINGLE_COLUMNS, Counts, LossTerm, PairObjective, Reference, SingleObjective, train_step
from burnish.trainer.columns import COMPUTED, collate, score_rows
from burnish.trainer.objective import Tally
from burnish.trainer.pairs import RUNNING
from burnish.types import Batch, Group, Pair, Rated, Row


class Preferences:
    """A learner of loop preference, and of loop sync (online DPO, arXiv:2402.04792; iterative RPO, arXiv:2404.19733).

    The reference runs only where a loss asks for it.
    """

    needs_reward = True

    def __init__(self, session: Session) -> None:
        self.session, s = session, session.settings
        self.setting = s.preference
        self.single = learns_from_single(s.preference)
        self.running = None
        if any(takes_running_delta(term.fn) for term in s.preference.losses):
            self.running = session.controls["running_reward"] = RunningReward()
        self.objective = _objective(s.preference, single=self.single, running=self.running)
        self.reference = None
        if self.objective.needs_reference:
            self.reference = Reference(session.state.policy, moves=s.preference.refresh_steps > 0, mix=s.preference.refresh_mix)
            session.tensors["reference"] = self.reference
        self.encode = Encoder(session)
        self.too_long = 0
        self.held_out: Batch | None = None
        self.step = partial(train_step, session.state, **session.step_values())

    # loop sync

    def keeping(self, place: Place) -> tuple[Callable[[Sequence[Group]], Kept], int]:
        """Groups whose samples all have the same reward make no pair; they are dropped and counted."""
        return partial(keep, constant_groups="drop"), 0

    def of_groups(self, place: Place, groups: Sequence[Group]) -> Batch:
        items = [item for group in groups for item in group.scored]
        reward = torch.tensor([item.reward for item in items], dtype=torch.float64)
        index = iter(range(len(items)))
        rows = []
        for pair in best_and_worst(reward, [[next(index) for _ in group.scored] for group in groups]):
            for rollout in (items[i].rollout for i in pair):
                rows.append(Row(rollout.tokens, rollout.sampled, rollout.columns))
        return Batch(tuple(self._with_reference(rows)), rows_per_unit=2)

    # loop preference

    def of_items(self, items: Sequence[Pair | Rated]) -> Batch:
        rows = self._rows(items)
        self.too_long = len(items) - len(rows) // 2
        return Batch(tuple(self._with_reference(rows)), rows_per_unit=2)

    def measure(self, items: Sequence[Pair | Rated]) -> dict[str, float]:
        """The loss and what belongs to it, of all held-out items at once."""
        state, sized = self.session.state, self._sized
        self.session.live.status("measuring held-out answers")
        if self.held_out is None:
            self.held_out = Batch(tuple(self._with_reference(self._rows(items))), rows_per_unit=2)
        elif self.setting.refresh_steps:
            self.held_out = Batch(tuple(self._with_reference(self.held_out.rows)), rows_per_unit=2)
        rows = self.held_out.rows
        if not rows:
            return {}
        for name in sorted(self.objective.needs & set(COMPUTED)):
            values = score_rows(state.policy, rows, column=name, **sized)
            rows = [row.put(**{name: value}) for row, value in zip(rows, values, strict=True)]
        whole = collate(rows, range(len(rows)), device="cpu")
        columns, tally = {**whole.numbers, **whole.given, "mask": whole.mask_BT}, Tally()
        terms = self.objective.terms(columns, Counts.of(rows, rows_per_unit=2))
        self.objective.measure(columns, tally)
        measured = {name.replace("train/", "eval/", 1): value for name, value in tally.values().items() if name != RUNNING}
        return {"eval/loss": float(sum(terms.values())), **measured}

    # both

    def update(self, batch: Batch) -> dict[str, float]:
        metrics = self.step(batch, self.objective)
        if self.single:
            metrics = _own(batch, metrics)
        if self.session.settings.data is not None:
            metrics["train/too_long_count"] = self.too_long
        if self.running is not None:
            self._run_on(metrics, len(batch.rows) // 2)
        step, every = self.session.state.step + 1, self.setting.refresh_steps
        if every and step % every == 0:
            self.reference.refresh(self.session.state.weights.masters)
        return metrics

    def _run_on(self, metrics: dict[str, float], num_pairs: int) -> None:
        """The step's rewards join the running mean, for the next step."""
        metrics["train/running_reward"] = self.running.mean
        if (mean := metrics.get(RUNNING)) is not None:
            of_step = torch.full((num_pairs,), mean, dtype=torch.float64)
            self.running.update(of_step, of_step)

    @property
    def _sized(self) -> dict[str, Any]:
        s = self.session.settings
        return {"sampling": s.sampling, "tokens_per_micro_batch": s.train.tokens_per_micro_batch}

    def _rows(self, items: Sequence[Pair | Rated]) -> list[Row]:
        """Two rows an item, of those that are short enough."""
        makes = self._of_rated if self.single else self._of_pair
        return [row for i in range(len(items)) if None not in (rows := makes(items, i)) for row in rows]

    def _of_pair(self, items: Sequence[Pair], i: int) -> tuple[Row | None, ...]:
        return tuple(self.encode(items[i].prompt, answer) for answer in (items[i].chosen, items[i].rejected))

    def _of_rated(self, items: Sequence[Rated], i: int) -> tuple[Row | None, ...]:
        """The answer, and the prompt with the next one's answer that is short enough."""
        item, count = items[i], len(items)
        own = self.encode(item.prompt, item.answer)
        others = (items[(i + k) % count].answer for k in range(1, count))
        other = next((row for answer in others if (row := self.encode(item.prompt, answer)) is not None), None) if own else None
        return tuple(row and Row(row.tokens, row.mask, numbers={"wanted": float(item.wanted)}) for row in (own, other))

    def _with_reference(self, rows: Sequence[Row]) -> list[Row]:
        if self.reference is None:
            return list(rows)
        self.session.live.status("scoring with the reference")
        return [row.put(logp_ref=logp) for row, logp in zip(rows, self.reference.score(rows, **self._sized), strict=True)]


def _own(batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with counts of answers alone, without the rows that stand for KTO's baseline. Tokens are not known where some of a
    step's updates were skipped.
    """
    trained = metrics.pop("train/rollouts_count")
    known = {len(batch.rows): sum(row.num_tokens for row in batch.rows[0::2]), 0: 0}
    del metrics["train/tokens_count"]
    return metrics | {"train/rollouts_count": trained // 2} | ({"train/tokens_count": known[trained]} if trained in known else {})


def _objective(p: Preference, *, single: bool, running: RunningReward | None) -> PairObjective | SingleObjective:
    def term(setting: Term) -> LossTerm:
        provided = SINGLE_COLUMNS if single else (*PAIR_COLUMNS, *(("delta",) if takes_running_delta(setting.fn) else ()))
        fn = setting.fn.bind(provided=provided, room=ROOMS["preference.losses"])
        return LossTerm(getattr(fn, "func", fn).__name__, fn, setting.weight)

    losses = tuple(term(setting) for setting in p.losses)
    if single:
        return SingleObjective(losses, with_reference=p.reference == "start")
    beside = LossTerm("nll", partial(nll, normalization=p.nll_normalization), p.nll_coef) if p.nll_coef else None
    return PairObjective(
        losses, beside, length_alpha=p.length_alpha, weigh_by_policy=p.weigh_by_policy, with_reference=p.reference == "start",
        running=running,
    )
