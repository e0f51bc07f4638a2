"""What of a reward model's settings and data does not fit is told before any weight is loaded."""

from __future__ import annotations

import json

import pytest
from tiny import tiny

from burnish.config.errors import SettingsError
from burnish.data.answers import jsonl_steps
from burnish.plan.preflight import check

BASE = {"loop": "reward_model", "tasks": None, "rewards": [], "algo": None, "sampling": {}, "train": {"steps": 2, "examples_per_step": 4}}
RATED = {"ref": "digit_sum_ratings", "size": 40}
KINDS = {
    "pairs": {**BASE, "data": {"source": {"ref": "digit_sum_pairs", "size": 40}}, "reward_model": {}},
    "ratings": {**BASE, "data": {"source": RATED}, "reward_model": {"loss": "squared_error", "outputs": 2}},
    "classes": {**BASE, "data": {"source": {**RATED, "kind": "classes"}}, "reward_model": {"loss": "ordinal", "classes": 3}},
    "steps": {
        **BASE, "data": {"source": {"ref": "steps_of_tasks", "tasks": {"ref": "copy_digits", "length": 2}}},
        "reward_model": {"loss": "step_cross_entropy", "outputs": 2},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits(kind):
    assert not any("reward_model" in note for note in check(tiny(KINDS[kind])))


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("pairs", {"reward_model.loss": "squared_error"}, "gives burnish.types.Pair, and reward_model.loss squared_error learns from Rated"),
    ("ratings", {"reward_model": {}}, "gives burnish.types.Rated, and reward_model.loss bradley_terry learns from Pair"),
    ("ratings", {"reward_model.outputs": 3}, r"has 2 ratings, and what is learned is reward_model.outputs=3"),
    ("classes", {"reward_model.classes": None}, "reward_model.classes is needed: ordinal learns ordered classes"),
    ("classes", {"reward_model.classes": 2}, r"is rated 2; with reward_model.classes=2 ratings are whole numbers from 0 to 1"),
    ("classes", {"reward_model.center_coef": 0.1}, "center_coef ties the two scores of a pair, and ordinal is not of pairs"),
    ("pairs", {"reward_model.classes": 3}, "reward_model.classes is for ordinal, not for bradley_terry"),
    ("pairs", {"reward_model.outputs": 2}, "reward_model.outputs is 2, and bradley_terry learns one score an answer"),
    ("pairs", {"reward_model.reduce": "rollout_mean"}, "reward_model.reduce is for steps"),
    ("steps", {"reward_model.outputs": 1}, "outputs is 1, and step_cross_entropy gives each step a class"),
    ("steps", {"reward_model": {"loss": "squared_error"}}, "has steps, which only a loss of steps"),
    ("ratings", {"reward_model": {"loss": "step_cross_entropy", "outputs": 2}}, "has no steps, and reward_model.loss judges steps"),
    ("pairs", {"reward_model.loss": "bradly_terry"}, "did you mean 'bradley_terry'"),
    ("pairs", {"reward_model.loss": {"ref": "bradley_terry", "slope": 1.0}}, r"takes no \['slope'\].*A loss may ask for columns"),
    ("pairs", {"reward_model.loss": "PARTS:mean"}, r"returned \(\) for 2 pairs; it gives one number for each, and takes no mean"),
    ("pairs", {"reward_model.loss": "PARTS:none"}, r"takes no score, so it has no gradient|learns from"),
    ("pairs", {"reward_model.loss": {"ref": "PARTS:sharp", "beta": -1.0}}, "sharp raised ValueError: beta is -1.0"),
])
def test_what_does_not_fit_is_refused_before_any_weight_is_loaded(tmp_path, kind, changes, message):
    parts = tmp_path / "parts_of_rewards.py"
    parts.write_text(
        "def mean(score_chosen, score_rejected): return (score_rejected - score_chosen).mean()\n"
        "def none(margin): return margin\n"
        "def sharp(score_chosen, score_rejected, *, beta):\n"
        "    if beta < 0: raise ValueError(f'beta is {beta}')\n    return beta * (score_rejected - score_chosen)\n"
    )
    changes = json.loads(json.dumps(changes).replace("PARTS", str(parts)))
    with pytest.raises(SettingsError, match=f"(?s){message}"):
        check(tiny({**KINDS[kind], **changes}))


STEPS = """
from burnish.types import Rated
def make(ratings, steps, answer="a b"):
    return [Rated(str(i), f"{i}>", answer, ratings=tuple(ratings), steps=tuple(steps)) for i in range(9)]
"""


@pytest.mark.parametrize(("values", "message"), [
    ({"ratings": [1.0, 0.0], "steps": [2, 2]}, r"its steps end at the characters \(2, 2\); ends increase, up to the 3 of the answer"),
    ({"ratings": [1.0, 0.0], "steps": [2, 4]}, r"\(2, 4\); ends increase, up to the 3"),
    ({"ratings": [1.0], "steps": [2, 3]}, "1 ratings of 2 steps; there is one a step, null where not known"),
    ({"ratings": [1.0, 2.0], "steps": [2, 3]}, r"is rated 2; with reward_model.outputs=2 ratings are whole numbers from 0 to 1"),
    ({"ratings": [None, None], "steps": [2, 3]}, "gives no rating that is known"),
])
def test_steps_that_do_not_fit(tmp_path, values, message):
    source = tmp_path / "steps_source.py"
    source.write_text(STEPS)
    with pytest.raises(SettingsError, match=f"(?s){message}"):
        check(tiny({**KINDS["steps"], "data": {"source": {"ref": f"{source}:make", **values}}}))


@pytest.mark.parametrize(("line", "message"), [
    ('{"prompt": "p", "completions": ["a"], "labels": [1, 0]}', r"steps.jsonl:1: 1 completions have 2 labels"),
    ('{"prompt": "p", "completions": "a", "labels": [1]}', "field 'completions' is a text; it is a list with one entry a step"),
    ('{"prompt": "p", "completions": [], "labels": []}', "it is a list of texts, one a step"),
    ('{"prompt": "p", "completions": ["a"], "labels": ["good"]}', "labels holds 'good'; a class is true or false, or 0, 1"),
    ('{"prompt": "p", "steps": ["a"], "labels": [1]}', "no field 'completions'"),
    ("", "holds no entries that can be used"),
])
def test_a_file_of_steps_that_cannot_be_used(tmp_path, line, message):
    (tmp_path / "steps.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        jsonl_steps(tmp_path / "steps.jsonl")


def test_a_file_of_steps(tmp_path):
    file = tmp_path / "steps.jsonl"
    lines = '{"prompt": "p", "completions": ["one", "two"], "labels": [true, null]}', '{"prompt": "q", "completions": ["x"], "labels": [2]}'
    file.write_text("\n".join(lines))
    one, two = jsonl_steps(file, between=";")
    assert (one.prompt, one.answer, one.steps, one.ratings) == ("p", "one;two;", (4, 8), (1.0, None))
    assert (two.steps, two.ratings) == ((2,), (2.0,))
    assert jsonl_steps(file, chat=True, limit=1)[0].prompt == ({"role": "user", "content": "p"},)
