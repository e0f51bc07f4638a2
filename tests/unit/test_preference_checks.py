"""What is refused of a preference run before any weight is loaded."""

from __future__ import annotations

import json
import re

import pytest
from tiny import TINY

from burnish.config import Settings
from burnish.config.errors import SettingsError
from burnish.plan.preflight import examine

DIGITS = {"ref": "copy_digits", "length": 2}
PAIRS, RATED = ({"source": {"ref": name, "tasks": DIGITS}, "held_out": 10} for name in ("pairs_of_tasks", "ratings_of_tasks"))
DPO = {"ref": "sigmoid", "beta": 0.1}
KTO = {"ref": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
PARTS = """
def mean(cur_chosen, cur_rejected): return (cur_rejected - cur_chosen).mean()
def other(cur_chosen, cur_rejected, delta): return cur_rejected - cur_chosen + delta
def still(ref_chosen, ref_rejected): return ref_chosen - ref_rejected
def asks(cur_chosen, length): return cur_chosen
def mine(cur_chosen, cur_rejected): return cur_rejected - cur_chosen
"""


@pytest.fixture
def problems(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def problems(*losses, data=PAIRS, loop="preference", train=None, **preference):
        own = {"data": data, "train": {"steps": 2, "examples_per_step": 4}}
        if loop == "sync":
            train_values = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2}
            own = {"train": train_values, **{name: TINY[name] for name in ("tasks", "rewards", "sampling")}}
        raw = {"name": "tiny", "loop": loop, "model": TINY["model"], **own}
        raw |= {"preference": {"losses": [{"fn": fn} for fn in losses], **preference}, "train": own["train"] | (train or {})}
        try:
            examine(Settings.model_validate_json(json.dumps(raw)))
        except SettingsError as error:
            return str(error)
        return ""

    return problems


@pytest.mark.parametrize("losses", [
    [DPO], [{"ref": "bco_pair", "beta": 0.1}], [{"ref": "bco_pair", "beta": 0.1, "delta": 0.0}], [{"ref": "slic", "delta": 1.0}],
    [{"ref": "nll", "normalization": "token_mean"}], [DPO, {"ref": "ipo", "beta": 0.1, "length_normalize": True}], ["parts.py:mine"],
], ids=str)
def test_losses_that_work(problems, losses):
    assert problems(*losses) == ""


def test_kto_works_on_ratings(problems):
    assert problems(KTO, data=RATED) == ""


@pytest.mark.parametrize("losses, values, message", [
    ([{"ref": "sigmod", "beta": 0.1}], {}, "sigmod: burnish.algorithms.preference_losses has no 'sigmod'; did you mean"),
    (["sigmoid"], {}, "preference.losses.0: sigmoid needs ['beta'], which neither the recipe nor this place provides. A loss of pairs may"),
    ([{"ref": "slic"}], {}, "slic needs ['delta']"),
    ([DPO, "parts.py:other"], {}, "preference.losses.1: parts.py:other needs ['delta']"),
    (["parts.py:asks"], {}, "parts.py:asks needs ['length']"),
    (["parts.py:mean"], {}, "preference.losses.0: parts.py:mean returned () for 2 pairs or answers; a preference loss gives one number"),
    (["parts.py:still"], {}, "takes neither cur_chosen nor cur_rejected nor cur, so it has no gradient"),
    ([{"ref": "sigmoid", "beta": -0.1}], {}, "preference.losses.0: beta must be above 0, got -0.1"),
    ([{"ref": "exo_pair", "beta": 0.1, "label_smoothing": 0.0}], {}, "label_smoothing must be above 0"),
    ([{"ref": "cpo", "beta": 0.1}], {"reference": "none"}, "preference.reference does nothing: none of preference.losses asks for"),
    ([{"ref": "simpo", "beta": 2.0, "gamma": 1.0}], {"refresh_steps": 5}, "preference.refresh_steps does nothing"),
    ([{"ref": "aot", "beta": 0.1}], {"weigh_by_policy": True}, "preference.weigh_by_policy weighs pairs, and aot gives its values by rank"),
    ([DPO, KTO], {}, "are partly of pairs and partly of single answers"),
    ([KTO], {"data": PAIRS}, "data: item 0 is a Pair, where the source returns a list of burnish.types.Rated"),
    ([DPO], {"data": RATED}, "data: item 0 is a Rated, where the source returns a list of burnish.types.Pair"),
    ([KTO], {"data": RATED, "nll_coef": 1.0}, "preference.nll_coef is of pairs, and kto learns from single answers; remove it"),
    ([KTO], {"data": RATED, "length_alpha": 0.5}, "preference.length_alpha is of pairs"),
    ([KTO], {"data": RATED, "weigh_by_policy": True}, "preference.weigh_by_policy is of pairs"),
    ([KTO], {"data": RATED, "train": {"examples_per_step": 1}}, "train.examples_per_step is 1 in 1 minibatches, and kto compares"),
    ([KTO], {"data": RATED, "train": {"minibatches": 3}}, "train.examples_per_step is 4 in 3 minibatches"),
    ([KTO], {"loop": "sync"}, "kto learns from single written answers; loop: sync makes pairs of samples"),
    ([DPO], {"loop": "sync", "train": {"samples_per_prompt": 1}}, "preference makes pairs of the samples of one prompt; use at least 2"),
])
def test_what_cannot_work_is_refused(problems, losses, values, message):
    assert re.search(re.escape(message), problems(*losses, **values))


def test_ratings_without_a_word_on_what_is_wanted_are_refused(problems, tmp_path):
    rows = [{"prompt": str(i), "completion": "7", "score": i} for i in range(30)]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"ref": "jsonl_ratings", "path": "scores.jsonl", "label": None, "ratings": ["score"]}
    assert "30 entries of jsonl_ratings do not say whether they are wanted, and kto needs that" in problems(KTO, data={"source": source})
