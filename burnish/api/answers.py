"""The loops on written answers: items are taken in order, made into rows by a learner, and learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from burnish.api.session import Session
from burnish.chat.template import encode_answer, end_token_ids
from burnish.data.tasks import Cursor
from burnish.loops import AnswersRecord, answers
from burnish.types import Batch, Prompt, Row


class Learner(Protocol):
    """of_items makes the rows of one step, update learns them, measure tells held-out items' metrics (eval/...)."""

    def of_items(self, items: Sequence[Any]) -> Batch: ...

    def update(self, batch: Batch) -> dict[str, float]: ...

    def measure(self, items: Sequence[Any]) -> dict[str, float]: ...


class Answers:
    """The method of loops sft, preference, reward_model and distill."""

    def __init__(self, session: Session, learner: Learner) -> None:
        self.session, self.learner = session, learner
        s, found = session.settings, session.checked.answers
        self.cursor = session.cursors["answers"] = Cursor(found.train, seed=s.seed, shuffle=s.data.shuffle)
        if found.held_out:
            session.measures.append(lambda step: learner.measure(found.held_out))

    def run(self) -> None:
        session, s = self.session, self.session.settings
        answers(
            session.state, steps=s.train.steps, take=partial(self.cursor.next, s.train.examples_per_step), assemble=self.learner.of_items,
            update=self.learner.update, clock=session.clock, taps=[self._tap],
        )

    def _tap(self, record: AnswersRecord) -> None:
        self.session.end_step(record.step, record.metrics, partial(self._rates, record))

    def _rates(self, record: AnswersRecord, times: Mapping[str, float]) -> dict[str, float]:
        passed = self.session.settings.train.epochs * sum(len(row.tokens) for row in record.batch.rows)
        return {"rate/train_tokens_per_s": passed / times["time/train_s"]} if times.get("time/train_s") else {}


class Encoder:
    """Prompts with answers to rows whose mask is the answer, each once; None where one is longer than data.max_tokens and the context."""

    def __init__(self, session: Session) -> None:
        s = session.settings
        self.tokenizer = session.loaded.tokenizer
        self.end = end_token_ids(self.tokenizer, s.evaluate.sampling.end_tokens)[0]
        self.most = min(session.loaded.context_tokens, s.data.max_tokens or session.loaded.context_tokens) if s.data else None

    def __call__(self, prompt: Prompt, answer: str) -> Row | None:
        tokens, mask = encode_answer(self.tokenizer, prompt, answer, end=self.end)
        return Row(tuple(tokens), tuple(mask)) if self.most is None or len(tokens) <= self.most else None
