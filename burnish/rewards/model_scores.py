"""Rewards by reward models that an earlier run trained, one or an ensemble of several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from burnish.chat.template import encode_answer, encode_steps
from burnish.config import Model
from burnish.models.heads import Scorer
from burnish.models.load import ModelError, inspect, load_scorer
from burnish.ref import Ref
from burnish.types import Rollout

COMBINATIONS = "burnish.algorithms.ensembles"


@dataclass(frozen=True, slots=True)
class _Member:
    """A reward model with its own tokenizer and template."""

    scorer: Scorer
    tokenizer: Any
    end: int
    context_tokens: int


class learned:
    """The score of what the policy wrote, by reward models from runs of loop reward_model or of another origin.

    paths: folders or hub names of sequence classifiers of transformers; of several, `combine` makes one score.
    combine: a function of burnish.algorithms.ensembles, as mean, minimum or {ref: mean_minus_variance, coef: 0.5}.
    weights: of the outputs of a model that has several; their weighted sum is its score.
    steps: for process reward models: a regular expression for what ends a step, such as a line's end; blank steps belong to the one
        before. A step's reward is the class that the model expects on average, over the highest one: from 0 to 1.
    dtype, tokens_per_batch: what the models compute in, and how many tokens, padding included, go through one at a time.

    A model reads text: the task's prompt and what was written after it, replies of an environment included, encoded by its own
    tokenizer and template, with its end token behind. So it serves a policy of any vocabulary. What looks like a special token in it
    is plain text: a policy must not end its turn in the reward model's eyes and begin another. A rollout whose text cannot be
    encoded, or is longer than the model's context, has no score.

    With isolate: false a step's rollouts are scored in batches, on the trainer's device; in a worker one by one, on one thread.
    """

    def __init__(
        self, *, paths: Sequence[str], combine: str | Mapping[str, Any] = "mean", weights: Sequence[float] | None = None,
        steps: str | None = None, dtype: Literal["float32", "bfloat16"] = "float32", tokens_per_batch: int = 16384,
    ) -> None:
        if isinstance(paths, str) or not paths:
            raise ValueError(f"paths is {paths!r}; it is a list of the folders of reward models")
        try:
            self.step_end = re.compile(steps) if steps else None
        except re.error as error:
            raise ValueError(f"steps is {steps!r}, which is no regular expression: {error}") from error
        self.weights, self.tokens_per_batch = weights, tokens_per_batch
        self.combine = Ref.parse(combine).bind(provided=("score",), room=COMBINATIONS)
        self.models = [Model(path=path, dtype=dtype) for path in paths]
        for model in self.models:
            self._check(model)
        self.combine(score=torch.zeros(len(paths), 1))       # an ensemble of another size than its weights is told here
        self.members: list[_Member] = []

    def load(self) -> None:
        """The weights. Called once, before the first rollout."""
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        for model in self.models:
            made = load_scorer(model, seed=0, outputs=None)
            module = made.module.requires_grad_(False).to(device)
            for p in module.parameters():       # and not the buffers, whose positions need their digits
                p.data = p.data.to(getattr(torch, model.dtype))
            ends = module.config.eos_token_id
            end = made.tokenizer.eos_token_id if ends is None else ends[0] if isinstance(ends, list) else ends
            self.members.append(_Member(Scorer(module), made.tokenizer, end, made.context_tokens))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """A number a rollout, or rewards of its steps, or the exception that tells why there is none."""
        ends = [_ends(_written(r), self.step_end) if self.step_end else [] for r in rollouts]
        each = [self._scores(member, rollouts, ends) for member in self.members]
        return [self._combined(scores, end) for *scores, end in zip(*each, ends, strict=True)]

    def _check(self, model: Model) -> None:
        path, outputs = model.path, _outputs(model)
        if outputs is None:
            raise ValueError(f"{path} holds a model without a head of scores; give the folder `model` of a run of loop reward_model")
        if self.step_end is not None:
            if self.weights is not None:
                raise ValueError("weights are for models of whole answers, not for those of steps; remove one of weights and steps")
            if outputs < 2:
                raise ValueError(f"{path} gives one number; a model that judges steps gives one a class. Remove `steps`")
        elif self.weights is None and outputs > 1:
            raise ValueError(
                f"{path} gives {outputs} numbers; say with `weights` what each counts, or with `steps` what ends a step if it judges steps"
            )
        elif self.weights is not None and len(self.weights) != outputs:
            raise ValueError(f"weights has {len(self.weights)} numbers, and {path} gives {outputs}")

    def _combined(self, scores: Sequence[Tensor | Exception], ends: Sequence[int]) -> Any:
        if failed := next((s for s in scores if isinstance(s, Exception)), None):
            return failed
        value = self.combine(score=torch.stack(list(scores)))
        return value.item() if not ends else list(zip(ends, value.tolist(), strict=True))

    @torch.no_grad()
    def _scores(self, member: _Member, rollouts: Sequence[Rollout], ends: Sequence[Sequence[int]]) -> list[Tensor | Exception]:
        """One number each, or one for each of its ends, in float64."""
        out: list[Tensor | Exception] = [ValueError("not scored")] * len(rollouts)
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for i, (rollout, ends_chars) in enumerate(zip(rollouts, ends, strict=True)):
            try:
                rows[i] = self._encoded(member, rollout, ends_chars)
            except Exception as error:
                out[i] = error
        for index in _batches({i: len(tokens) for i, (tokens, _) in rows.items()}, self.tokens_per_batch):
            length = max(len(rows[i][0]) for i in index)
            token_BT = torch.tensor([rows[i][0] + [0] * (length - len(rows[i][0])) for i in index], device=member.scorer.device)
            hidden_BTD = member.scorer.hidden(token_BT)
            for b, i in enumerate(index):
                out[i] = self._value(member.scorer.scores(hidden_BTD[b, rows[i][1]]).double().cpu(), bool(ends[i]))
        return out

    def _encoded(self, member: _Member, rollout: Rollout, ends_chars: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and the places that are scored."""
        text = _written(rollout)
        if self.step_end is not None and any(turn.author == "env" for turn in rollout.turns):
            raise ValueError("steps are those of one turn, and an environment replied in between")
        if self.step_end is not None and not ends_chars:
            raise ValueError("the policy wrote nothing, so there is no step to score")
        if ends_chars:
            tokens, places = encode_steps(member.tokenizer, rollout.task.prompt, text, ends_chars, specials=False)
        else:
            tokens, _ = encode_answer(member.tokenizer, rollout.task.prompt, text, end=member.end, specials=False)
            places = [len(tokens) - 1]
        if len(tokens) > member.context_tokens:
            raise ValueError(f"the text has {len(tokens)} tokens, more than the {member.context_tokens} of the reward model's context")
        return tokens, places

    def _value(self, scores: Tensor, of_steps: bool) -> Tensor:
        """[n], [n,K] -> [] or, of steps, [n]"""
        if of_steps:
            classes = torch.arange(scores.shape[-1], dtype=scores.dtype)
            return (scores.softmax(-1) * classes).sum(-1) / classes[-1]
        return scores[0] if self.weights is None else (scores[0] * torch.tensor(self.weights, dtype=scores.dtype)).sum()


def _outputs(model: Model) -> int | None:
    try:
        return inspect(model).outputs
    except ModelError as error:
        run = re.fullmatch(r"runs/([\w.-]+)/model/?", model.path)
        hint = f"; it is what a run leaves, so make it first: burnish train {run[1]}" if run else ""
        raise ValueError(str(error).replace("model.path ", "") + hint) from error


def _written(rollout: Rollout) -> str:
    """All that was written after the prompt."""
    return "".join(turn.text for turn in rollout.turns if turn.author != "prompt")


def _ends(text: str, step_end: re.Pattern[str]) -> list[int]:
    """Characters up to each step's end. A step without text belongs to the one before it, or to the next where it is the first."""
    ends: list[int] = []
    start = 0
    for at in dict.fromkeys([*(match.end() for match in step_end.finditer(text)), len(text)]):
        if text[start:at].strip() or (at == len(text) and at > start and not ends):
            ends.append(at)
        elif ends:
            ends[-1] = at
        else:
            continue
        start = at
    return ends


def _batches(lengths: Mapping[int, int], budget_tokens: int) -> list[list[int]]:
    """Keys of like length together, padded size within the budget; the same for the same lengths."""
    out: list[list[int]] = []
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        if out and (len(out[-1]) + 1) * lengths[out[-1][0]] <= budget_tokens:
            out[-1].append(i)
        else:
            out.append([i])
    return out
