"""What can be known of teachers and of a critic's own model before their weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from burnish.config import Settings
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.load import inspect as inspect_model


def problems_of_teachers(s: Settings) -> Iterator[str]:
    """A model that is not there, or whose tokens are not the policy's."""
    others = {f"distill.teachers.{i}.model": teacher.model for i, teacher in enumerate(s.distill.teachers if s.distill else ())}
    if s.critic is not None and s.critic.model is not None:
        others["critic.model"] = s.critic.model
    try:
        own = load_tokenizer(s.model) if others else None
    except ModelError:      # told where the policy is looked at
        own = None
    for place, model in others.items():
        path = model.path
        try:
            inspect_model(model)
            theirs = load_tokenizer(model)
        except ModelError as error:
            text = str(error)
            run = re.fullmatch(r"runs/([\w.-]+)/model/?", path or "")
            hint = f"; it is what a run leaves, so make it first: burnish train {run[1]}" if run else ""
            yield (f"{place}.{text.removeprefix('model.')}" if text.startswith("model.") else f"{place}: {text}") + hint
            continue
        if own is not None and theirs is not None and (gap := vocabulary_gap(own.get_vocab(), theirs.get_vocab())):
            yield f"{place}: {gap}"


def vocabulary_gap(own: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """Why what the other model gives for the policy's tokens would be meant for other tokens; None where the two vocabularies are one."""
    if own == theirs:
        return None
    token = min(own.items() ^ theirs.items(), key=lambda item: item[::-1])[0]
    return (
        f"its tokens are not those of the policy: {token!r} has the number {theirs.get(token, 'none')} there and {own.get(token, 'none')} "
        "here; it reads the policy's tokens, so it must be a model with the policy's vocabulary"
    )
