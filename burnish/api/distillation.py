"""Learn the distributions of teachers, token by token: on written answers, or on the policy's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

from burnish.api.answers import Encoder
from burnish.api.policy_gradient import REDUCE_ARGS, teachers_of
from burnish.api.session import Place, Session
from burnish.config import Sampling
from burnish.envs import single_turn
from burnish.plan.preflight import ROOMS
from burnish.plan.references import DIVERGENCE_ARGS
from burnish.rollout import Kept, Visit, keep, run_groups
from burnish.trainer import train_step
from burnish.trainer.tokens import DivergenceObjective, against_teachers, token_means
from burnish.types import Batch, Example, Group, Rollout, Row, Scored, Task


def is_on_policy(step: int, frac: float, *, seed: int) -> bool:
    """Whether the policy itself answers in this step: a share `frac` of all steps, decided by a hash of seed and step."""
    digest = blake2b(json.dumps(["on policy", seed, step]).encode(), digest_size=8).digest()
    return int.from_bytes(digest) < frac * 2**64


class Distillation:
    """A learner of loop distill, where a share of the steps may be the policy's own (GKD, arXiv:2306.13649 algorithm 1), and of loop
    sync, where all are.

    The divergence is taken at each token of an answer, and there is no gradient through which answers were sampled.
    """

    needs_reward = False

    def __init__(self, session: Session) -> None:
        self.session, s = session, session.settings
        self.encode = Encoder(session)
        self.counts: dict[str, float] = {}
        teachers = teachers_of(session)
        divergence = s.distill.divergence.bind(provided=DIVERGENCE_ARGS, room=ROOMS["distill.divergence"])
        self.teachers = against_teachers(teachers.policies, teachers.weights, divergence, temperature=s.distill.temperature)
        reduce = s.distill.reduce.bind(provided=REDUCE_ARGS, room=ROOMS["distill.reduce"])
        self.step = partial(
            train_step, session.state, algo=DivergenceObjective(self.teachers, reduce), **session.step_values(sampling=Sampling())
        )

    # loop sync

    def keeping(self, place: Place) -> tuple[Callable[[Sequence[Group]], Kept], int]:
        """The function that keeps groups, and how often more tasks are drawn for those it drops."""
        return partial(keep, needs_reward=False), 0

    def of_groups(self, place: Place, groups: Sequence[Group]) -> Batch:
        return Batch(tuple(_row(item.rollout) for g in groups for item in g.scored))

    # loop distill

    def answer(self, examples: Sequence[Example], times_before: Sequence[int]) -> Sequence[Example | Rollout]:
        """The examples as they are, or in a step that is the policy's own what it answers to their prompts."""
        session, s = self.session, self.session.settings
        step = session.state.step + 1
        if not is_on_policy(step, s.distill.on_policy_frac, seed=s.seed):
            return examples
        groups = run_groups(
            [Visit(Task(e.id, e.prompt, e.answer), n) for e, n in zip(examples, times_before, strict=True)],
            engine=session.engine, tokenizer=session.loaded.tokenizer, env=single_turn, scorer=_Unscored(), sampling=s.sampling,
            samples_per_prompt=1, seed=s.seed, clock=session.clock, progress=partial(session.live.status, "generating"),
        )
        session.save_rollouts("rollouts", step, groups)
        return [item.rollout for g in groups for item in g.scored]

    def of_items(self, items: Sequence[Example | Rollout]) -> Batch:
        rollouts = [item for item in items if isinstance(item, Rollout)]
        examples = [item for item in items if isinstance(item, Example)]
        own = [_row(r) for r in rollouts if r.num_sampled and not r.stop.startswith("error:")]
        written = self.encode.rows(examples)
        self.counts = {
            "train/too_long_count": len(examples) - len(written), "rollout/dropped_rollouts_count": len(rollouts) - len(own),
            "train/on_policy_frac": len(own) / max(len(own) + len(written), 1),
        }
        if own:
            self.counts["rollout/sampled_tokens_mean"] = sum(r.num_sampled for r in rollouts) / len(rollouts)
            self.counts["rollout/truncated_frac"] = sum(r.truncated for r in rollouts) / len(rollouts)
        return Batch((*own, *written))

    def measure(self, items: Sequence[Example]) -> dict[str, float]:
        session = self.session
        means = token_means(
            session.state.policy, self.encode.rows(items), tokens_per_micro_batch=session.settings.train.tokens_per_micro_batch,
            against={"divergence": self.teachers}, progress=partial(session.live.status, "measuring held-out answers"),
        )
        return {"eval/loss_nats": means["nll"], "eval/divergence_nats": means["divergence"]} if means else {}

    def update(self, batch: Batch) -> dict[str, float]:
        return self.counts | self.step(batch)


class _Unscored:
    """Answers that are only learned from need no reward."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        return [Scored(rollout, None, {}) for rollout in rollouts]


def _row(rollout: Rollout) -> Row:
    return Row(rollout.tokens, rollout.sampled)
