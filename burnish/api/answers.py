"""The loops on written answers: items are taken in order, made into rows by a learner, and learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from burnish.api.session import Session
from burnish.chat.template import encode_answer, end_token_ids
from burnish.data.tasks import Cursor
from burnish.loops import AnswersRecord, answers
from burnish.trainer.state import publish
from burnish.types import Batch, Example, Prompt, Row


class Learner(Protocol):
    """of_items makes the rows of one step, update learns them, measure tells held-out items' metrics (eval/...)."""

    def of_items(self, items: Sequence[Any]) -> Batch: ...

    def update(self, batch: Batch) -> dict[str, float]: ...

    def measure(self, items: Sequence[Any]) -> dict[str, float]: ...


class Answers:
    """The method of loops sft, preference, reward_model and distill.

    prepare(items, times_before): what the learner gets in place of the items of a step, and of how often each was taken before.
    """

    def __init__(
        self, session: Session, learner: Learner, *, prepare: Callable[[Sequence[Any], Sequence[int]], Sequence[Any]] | None = None
    ) -> None:
        self.session, self.learner, self.prepare = session, learner, prepare
        s, found = session.settings, session.checked.answers
        self.cursor = session.cursors["answers"] = Cursor(found.train, seed=s.seed, shuffle=s.data.shuffle)
        if found.held_out:
            session.measures.append(lambda step: learner.measure(found.held_out))

    def run(self) -> None:
        session, s = self.session, self.session.settings
        answers(
            session.state, steps=s.train.steps, take=self._take, assemble=self.learner.of_items, update=self.learner.update,
            clock=session.clock, taps=[self._tap],
        )

    def _take(self) -> Sequence[Any]:
        start, size = self.cursor.position, len(self.session.checked.answers.train)
        items = self.cursor.next(self.session.settings.train.examples_per_step)
        return self.prepare(items, [at // size for at in range(start, self.cursor.position)]) if self.prepare else items

    def _tap(self, record: AnswersRecord) -> None:
        if self.session.engine is not None:
            publish(self.session.state, self.session.engine)
        self.session.end_step(record.step, record.metrics, partial(self._rates, record))

    def _rates(self, record: AnswersRecord, times: Mapping[str, float]) -> dict[str, float]:
        rates = {}
        if times.get("time/generate_s"):
            rates["rate/generate_tokens_per_s"] = record.batch.num_tokens / times["time/generate_s"]
        if times.get("time/train_s") and record.metrics.get("train/tokens_count"):
            passed = self.session.settings.train.epochs * sum(len(row.tokens) for row in record.batch.rows)
            rates["rate/train_tokens_per_s"] = passed / times["time/train_s"]
        return rates


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

    def rows(self, examples: Sequence[Example]) -> list[Row]:
        """Of those that are short enough."""
        return [row for e in examples if (row := self(e.prompt, e.answer)) is not None]
