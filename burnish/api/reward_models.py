"""Learn to score answers: pairs, ratings, ordered classes, or the steps of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from burnish.api.answers import Encoder
from burnish.api.policy_gradient import REDUCE_ARGS
from burnish.api.session import Session
from burnish.chat.template import encode_steps
from burnish.config import Sampling
from burnish.plan.preflight import ROOMS
from burnish.plan.reward_models import COLUMNS, kind_of_loss
from burnish.trainer import ClassScores, Objective, PairScores, RatedScores, StepScores, measure_scores, train_step
from burnish.types import Batch, Pair, Rated, Row


class RewardModels:
    """A learner of loop reward_model. A whole answer is scored at its end token, a step at its last token."""

    def __init__(self, session: Session) -> None:
        self.session, s = session, session.settings
        self.kind = kind_of_loss(s.reward_model.loss)
        self.encode = Encoder(session)
        self.too_long = 0
        self.objective = self._objective()
        self.rows_per_unit = 2 if self.kind == "pairs" else 1
        self.step = partial(train_step, session.state, algo=self.objective, **session.step_values(sampling=Sampling()))

    def of_items(self, items: Sequence[Pair | Rated]) -> Batch:
        """Of those that are short enough; a pair is left out whole. Answers without a rating that is known have no row."""
        items = [item for item in items if isinstance(item, Pair) or any(rating is not None for rating in item.ratings)]
        makes = {"pairs": self._of_pair, "steps": self._of_steps}.get(self.kind, self._of_rated)
        made = [makes(item) for item in items]
        whole = [rows for rows in made if None not in rows]
        self.too_long = len(made) - len(whole)
        return Batch(tuple(row for rows in whole for row in rows), self.rows_per_unit)

    def update(self, batch: Batch) -> dict[str, float]:
        return self.step(batch) | {"train/too_long_count": self.too_long}

    def measure(self, items: Sequence[Pair | Rated]) -> dict[str, float]:
        """The loss and what belongs to it, of all held-out items."""
        session = self.session
        session.live.status("measuring held-out answers")
        return measure_scores(
            session.state.policy, self.of_items(items), self.objective,
            tokens_per_micro_batch=session.settings.train.tokens_per_micro_batch,
        )

    def _objective(self) -> Objective:
        r = self.session.settings.reward_model
        loss = r.loss.bind(provided=COLUMNS[self.kind], room=ROOMS["reward_model.loss"])
        if self.kind == "pairs":
            return PairScores(loss, r.center_coef)
        if self.kind == "classes":
            return ClassScores(loss, self.session.state.policy.thresholds)
        if self.kind == "steps":
            return StepScores(loss, r.reduce.bind(provided=REDUCE_ARGS, room=ROOMS["reward_model.reduce"]))
        return RatedScores(loss, r.outputs)

    def _of_pair(self, pair: Pair) -> tuple[Row | None, ...]:
        rows = (self.encode(pair.prompt, answer) for answer in (pair.chosen, pair.rejected))
        return tuple(row and _at_end(row, margin=pair.margin or 0.0) for row in rows)

    def _of_rated(self, item: Rated) -> tuple[Row | None, ...]:
        row = self.encode(item.prompt, item.answer)
        if row is None:
            return (None,)
        if self.kind == "classes":
            return (_at_end(row, label=item.ratings[0]),)
        known = {f"known_{k}": float(rating is not None) for k, rating in enumerate(item.ratings)}
        ratings = {f"rating_{k}": rating or 0.0 for k, rating in enumerate(item.ratings)}
        return (_at_end(row, **ratings, **known, num_ratings=sum(known.values())),)

    def _of_steps(self, item: Rated) -> tuple[Row | None, ...]:
        tokens, places = encode_steps(self.encode.tokenizer, item.prompt, item.answer, item.steps)
        if self.encode.most is not None and len(tokens) > self.encode.most:
            return (None,)
        label = {at: rating for at, rating in zip(places, item.ratings, strict=True) if rating is not None}
        column = tuple(float(label.get(at, 0.0)) for at in range(len(tokens)))
        return (Row(tuple(tokens), tuple(at in label for at in range(len(tokens))), {"label": column}),)


def _at_end(row: Row, **numbers: float) -> Row:
    """The row with its last token alone in the mask."""
    return replace(row, mask=(False,) * (len(row.tokens) - 1) + (True,), numbers=numbers)
