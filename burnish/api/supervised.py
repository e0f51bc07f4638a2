"""Learn answers token by token: written ones, or the best of the policy's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from burnish.api.answers import Encoder
from burnish.api.policy_gradient import REDUCE_ARGS
from burnish.api.session import Place, Session
from burnish.config import Sampling
from burnish.plan.preflight import ROOMS
from burnish.rollout import Kept, keep_best
from burnish.trainer import train_step
from burnish.trainer.tokens import TokenObjective, token_means
from burnish.types import Batch, Example, Group, Row


class Supervised:
    """A learner of loop sft, and of loop sync, where the answers are the best samples of each group (rejection sampling, RFT:
    arXiv:2308.01825; best of n).

    The log-probs are those of the model itself, whatever temperature samples were drawn with.
    """

    needs_reward = True

    def __init__(self, session: Session) -> None:
        self.session, s = session, session.settings
        self.encode = Encoder(session)
        self.too_long = 0
        loss = s.sft.loss.bind(provided=("logp_cur",), room=ROOMS["sft.loss"])
        objective = TokenObjective(loss, s.sft.reduce.bind(provided=REDUCE_ARGS, room=ROOMS["sft.reduce"]))
        self.step = partial(train_step, session.state, algo=objective, **session.step_values(sampling=Sampling()))

    # loop sync

    def keeping(self, place: Place) -> tuple[Callable[[Sequence[Group]], Kept], int]:
        """The function that keeps groups, and how often more tasks are drawn for those it drops."""
        setting = self.session.settings.sft
        return partial(keep_best, best_of=setting.best_of, min_reward=setting.min_reward), 0

    def of_groups(self, place: Place, groups: Sequence[Group]) -> Batch:
        return Batch(tuple(Row(item.rollout.tokens, item.rollout.sampled) for g in groups for item in g.scored))

    # loop sft

    def of_items(self, items: Sequence[Example]) -> Batch:
        rows = self.encode.rows(items)
        self.too_long = len(items) - len(rows)
        return Batch(tuple(rows))

    def measure(self, items: Sequence[Example]) -> dict[str, float]:
        session = self.session
        means = token_means(
            session.state.policy, self.encode.rows(items), tokens_per_micro_batch=session.settings.train.tokens_per_micro_batch,
            progress=partial(session.live.status, "measuring held-out answers"),
        )
        return {"eval/loss_nats": means["nll"]} if means else {}

    def update(self, batch: Batch) -> dict[str, float]:
        return self.step(batch) | ({"train/too_long_count": self.too_long} if self.session.settings.data else {})
