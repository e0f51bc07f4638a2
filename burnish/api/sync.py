"""Loop sync: environments are visited, what comes out is learned by one of the methods of learners."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from burnish.api.session import NoRewardError, Place, Session, reasons_of
from burnish.data.tasks import Cursor
from burnish.loops import StepRecord
from burnish.loops import sync as sync_loop
from burnish.rollout import Gathered, Kept, Visit, gather, run_groups, summarize
from burnish.types import Batch, Group

MAX_UNSCORED_STEPS = 3


class Sync:
    """The rollouts of each step, from each environment, and the learner they go to."""

    def __init__(self, session: Session, learner: Any) -> None:
        self.session, self.learner = session, learner
        s = session.settings
        self.unscored_steps = 0
        for place in session.places:
            session.cursors[place.name or "tasks"] = Cursor(
                session.checked.tasks[place.name].train, seed=s.seed, shuffle=place.setting.tasks.shuffle
            )

    def run(self) -> None:
        session = self.session
        sync_loop(
            session.state, steps=session.settings.train.steps, gather=self._gather, assemble=self._assemble, update=self.learner.update,
            engine=session.engine, clock=session.clock, taps=[self._tap],
        )

    def _gather(self) -> list[Gathered]:
        out = []
        for place in self.session.places:
            keep, rounds = self.learner.keeping(place)
            out.append(gather(
                place.setting.prompts_per_step, next_visits=partial(self._next_visits, place), roll=partial(self._roll, place), keep=keep,
                refill_rounds=rounds,
            ))
        return out

    def _next_visits(self, place: Place, n: int) -> list[Visit]:
        """The next tasks. A task that comes again has its samples numbered on."""
        cursor, size = self.session.cursors[place.name or "tasks"], len(self.session.checked.tasks[place.name].train)
        seen = [at // size for at in range(cursor.position, cursor.position + n)]
        return [Visit(task, epoch) for task, epoch in zip(cursor.next(n), seen, strict=True)]

    def _roll(self, place: Place, visits: list[Visit]) -> list[Group]:
        s = self.session.settings
        return run_groups(
            visits, sampling=s.sampling, samples_per_prompt=s.train.samples_per_prompt,
            purpose=f"train {place.name}" if place.name else "train", progress=partial(self.session.live.status, "generating"),
            **self.session.parts(place, rewards="learning"),
        )

    def _assemble(self, gathered: Sequence[Gathered]) -> Batch:
        pairs = zip(self.session.places, gathered, strict=True)
        batches = [self.learner.of_groups(place, one.kept.groups) for place, one in pairs]
        return Batch(tuple(row for batch in batches for row in batch.rows), rows_per_unit=batches[0].rows_per_unit)

    # what reads along

    def _tap(self, record: StepRecord) -> None:
        session, groups = self.session, [g for one in record.gathered for g in one.groups]
        kept = Kept(
            tuple(g for one in record.gathered for g in one.kept.groups),
            dict(sum((Counter(one.kept.dropped) for one in record.gathered), Counter())),
        )
        success = session.settings.evaluate.success_reward
        metrics = summarize(groups, kept, success_reward=success) | record.metrics
        metrics["rollout/dropped_rollouts_count"] += record.metrics.get("rollout/left_out_count", 0)
        if any(self.learner.keeping(place)[1] for place in session.places):
            metrics["rollout/refill_rounds_count"] = sum(one.refills for one in record.gathered)
        if len(session.places) > 1:
            for place, one in zip(session.places, record.gathered, strict=True):
                rewards = [s.reward for g in one.groups for s in g.scored if s.reward is not None]
                if rewards:
                    metrics[f"rollout/reward_{place.name}_mean"] = sum(rewards) / len(rewards)
        session.save_rollouts("rollouts", record.step, groups, _advantages(session.places, record))
        self._stop_without_rewards(record.step, groups)
        session.may_save = not self.unscored_steps
        session.end_step(record.step, metrics, partial(self._rates, record, groups))

    def _rates(self, record: StepRecord, groups: Sequence[Group], times: Mapping[str, float]) -> dict[str, float]:
        rates = {}
        if times.get("time/generate_s"):
            sampled = sum(i.rollout.num_sampled for g in groups for i in g.scored)
            rates["rate/generate_tokens_per_s"] = sampled / times["time/generate_s"]
        if times.get("time/train_s") and record.metrics.get("train/tokens_count"):
            passed = self.session.settings.train.epochs * sum(len(r.tokens) for r in record.batch.rows)
            rates["rate/train_tokens_per_s"] = passed / times["time/train_s"]
        return rates

    def _stop_without_rewards(self, step: int, groups: Sequence[Group]) -> None:
        """One step may meet a judge that is down; several in a row are a reward that does not work."""
        if not self.learner.needs_reward:
            return
        scored = [s for g in groups for s in g.scored]
        self.unscored_steps = 0 if any(s.reward is not None for s in scored) else self.unscored_steps + 1
        if self.unscored_steps >= min(MAX_UNSCORED_STEPS, self.session.settings.train.steps):
            text, count = Counter(reasons_of(scored)).most_common(1)[0]
            raise NoRewardError(
                f"not one rollout of the last {self.unscored_steps} steps could be scored, so there is nothing to learn from; "
                f"in step {step}, {count} of {len(scored)} times: {text}"
            )


def _advantages(places: Sequence[Place], record: StepRecord) -> list[list[float | None]]:
    """The mean advantage of each rollout's tokens, None where it was not trained on or has none."""
    trained, out = {}, []
    for row in record.batch.rows:
        if "adv" in row.columns:
            values = [v for v, m in zip(row.columns["adv"], row.mask, strict=True) if m]
            mean = math.fsum(values) / len(values) if values else 0.0
            trained[row.algo, int(row.numbers["rollout"])] = mean if math.isfinite(mean) else None
    for place, one in zip(places, record.gathered, strict=True):
        kept = (item.rollout for g in one.kept.groups for item in g.scored)
        by_rollout = {(r.task.id, r.sample): trained.get((place.name, i)) for i, r in enumerate(kept)}
        out += [[by_rollout.get((i.rollout.task.id, i.rollout.sample)) for i in g.scored] for g in one.groups]
    return out
