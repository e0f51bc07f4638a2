"""The engine as a run uses it: what shapes a sample shapes what the trainer scores, and what the engine cannot do is refused."""

from __future__ import annotations

import pytest
from tiny import tiny

from burnish.api import Trainer
from burnish.config.errors import SettingsError
from burnish.monitor.writer import read_metrics
from burnish.plan.preflight import examine


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling.logit_bias": {"3": 2.0, "4": -1.0}, "sampling.banned_tokens": ["7"]},
        {"sampling.repetition_penalty": 1.7, "sampling.temperature": 0.8, "train.allow_in_sampling": ["repetition_penalty"]},
        {"sampling.min_new_tokens": 2, "sampling.end_tokens": ["1", "2"], "sampling.max_new_tokens": 4,
         "train.allow_in_sampling": ["min_new_tokens"]},
        {"sampling.top_k": 5, "sampling.top_p": 0.9, "sampling.min_p": 0.05},
    ],
    ids=["bias", "repetition", "minimum", "filters"],
)
@pytest.mark.parametrize("compiled", [None, False], ids=["compiled", "torch"])
def test_the_trainer_scores_what_was_sampled(tmp_path, changes, compiled):
    engine = {"engine": {"ref": "native", "compiled": compiled}} if compiled is False else {}
    Trainer(tiny({**changes, **engine, "train.steps": 3}), out=tmp_path / "run").run()
    rows = [row for row in read_metrics(tmp_path / "run") if "train/kl_cur_gen_nats" in row]
    assert rows                # steps whose groups all had equal rewards train nothing
    assert all(row["train/kl_cur_gen_nats"] < 1e-9 for row in rows)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sampling.repetition_penalty": 1.2}, r"train\.allow_in_sampling: \[repetition_penalty\]"),
        ({"sampling.min_new_tokens": 1}, r"train\.allow_in_sampling: \[min_new_tokens\]"),
        ({"train.allow_in_sampling": ["min_new_tokens"]}, "which sampling does not set"),
        ({"sampling.guide": {"regex": "1"}}, r"sampling\.guide leaves tokens out"),
        ({"sampling.guide": {"regex": "1", "grammar": "x"}}, "found regex and grammar"),
        ({"sampling.logit_bias": {"3": float("inf")}}, "should be a finite number"),
        ({"sampling.logit_bias": {"3": 1.0}, "sampling.banned_tokens": ["3"]}, "stands in logit_bias and in banned_tokens"),
    ],
)
def test_samplings_that_are_refused_at_once(changes, text):
    with pytest.raises((ValueError, SettingsError), match=text):
        tiny(changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"engine": {"ref": "native", "slot": 3}}, "did you mean 'slots'"),
        ({"engine": {"ref": "native", "slots": 0}}, "engine.slots is a whole number from 1 on; found 0"),
        ({"engine": {"ref": "native", "cache_tokens": "many"}}, "engine.cache_tokens is a whole number from 1 on; found 'many'"),
        ({"engine": {"ref": "native", "drafts": "sometimes"}}, "engine.drafts is one of auto, always, never; found 'sometimes'"),
        ({"engine": {"ref": "native", "compiled": 1}}, "engine.compiled is one of null, true, false; found 1"),
        ({"engine": "nativ"}, "did you mean 'native'"),
        ({"engine": {"ref": "vllm"}, "sampling.min_new_tokens": 1, "train.allow_in_sampling": ["min_new_tokens"]},
         "the vllm engine does not know sampling.min_new_tokens"),
        ({"sampling.banned_tokens": ["zz"]}, "sampling.banned_tokens: 'zz' is not one token"),
        ({"evaluate.sampling.logit_bias": {"99999": 1.0}}, "evaluate.sampling.logit_bias: '99999' is not one token"),
        ({"evaluate.sampling.guide": {"regex": "("}}, "evaluate.sampling.guide.regex cannot be used"),
    ],
)
def test_what_the_check_finds(changes, text):
    with pytest.raises(SettingsError) as caught:
        examine(tiny(changes))
    assert text in str(caught.value)
