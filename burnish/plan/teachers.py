"""What can be known of teachers before their weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from burnish.config import Settings
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.load import inspect as inspect_model


def problems_of_teachers(s: Settings) -> Iterator[str]:
    """A model that is not there, or whose tokens are not the policy's."""
    try:
        own = load_tokenizer(s.model) if s.distill is not None else None
    except ModelError:      # told where the policy is looked at
        own = None
    for i, teacher in enumerate(s.distill.teachers if s.distill is not None else ()):
        place, path = f"distill.teachers.{i}.model", teacher.model.path
        try:
            inspect_model(teacher.model)
            theirs = load_tokenizer(teacher.model)
        except ModelError as error:
            text = str(error)
            run = re.fullmatch(r"runs/([\w.-]+)/model/?", path or "")
            hint = f"; it is what a run leaves, so make it first: burnish train {run[1]}" if run else ""
            yield (f"{place}.{text.removeprefix('model.')}" if text.startswith("model.") else f"{place}: {text}") + hint
            continue
        if own is not None and theirs is not None and (gap := vocabulary_gap(own.get_vocab(), theirs.get_vocab())):
            yield f"{place}: {gap}"


def vocabulary_gap(own: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """Why the teacher's log-probs of the policy's tokens would be those of other tokens; None where the two vocabularies are one."""
    if own == theirs:
        return None
    token = min(own.items() ^ theirs.items(), key=lambda item: item[1])[0]
    return (
        f"its tokens are not those of the policy: {token!r} has the number {theirs.get(token, 'none')} there and {own.get(token, 'none')} "
        "here; distributions are compared token by token, so the teacher must be a model with the policy's vocabulary"
    )
