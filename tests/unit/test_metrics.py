"""Declarations of metrics: all that the package names has one, and what is declared is named somewhere."""

import re
from pathlib import Path

import pytest

from burnish.monitor.metrics import _FAMILIES, METRICS, metric

PACKAGE = Path(__file__).parents[2] / "burnish"
STAGES = "rollout|train|eval|rate|memory"
FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "monitor" / "metrics.py"]
TEXT = "\n".join(f.read_text() for f in FILES)
NAMED = sorted(set(re.findall(rf"f?[\"']((?:{STAGES})/[^\"'/]+)[\"']", TEXT)))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_metric_is_declared(name):
    """An f-string makes declared names, or those of a family; the runs of other tests show that it makes no others."""
    if "{" not in name:
        assert metric(name).meaning
        return
    known = [*METRICS, *(family.name for family in _FAMILIES)]
    made = re.compile(re.sub(r"\\\{[^}]*\\\}", "(?:[a-z_]*|<>)", re.escape(name)))
    assert any(made.fullmatch(one) for one in known)


def test_the_search_finds_them():
    assert len(NAMED) > 30 and {"train/loss", "train/loss_{name}", "rollout/reward_{place.name}_mean"} <= set(NAMED)


@pytest.mark.parametrize("name", METRICS)
def test_a_declared_metric_is_named(name):
    if name.startswith("time/"):
        phase = name.removeprefix("time/").removesuffix("_s")
        assert phase in ("step", "other") or f'"{phase}"' in TEXT
    else:      # what an objective measures of its rows is, of held-out ones, called eval/ in place of train/
        names = (name, name.replace("eval/", "train/", 1))
        assert any(re.fullmatch(re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(one)), n) for one in NAMED for n in names)


def test_families_and_unknown_names():
    assert metric("rollout/score_exact_mean").meaning == "Score of the reward exact, before its weight"
    assert metric("rollout/reward_sums_mean").meaning == "Reward of the scored rollouts of the environment sums"
    assert metric("train/loss_kl").meaning == "The term kl of the loss, with its weight"
    assert (metric("train/kl_coef").name, metric("train/kl_coef_sums").reduction) == ("train/kl_coef", "last")
    for name in ("rollout/score_mean", "rollout/rewards_mean", "train/loss_", "train/loses"):
        with pytest.raises(KeyError, match="no metric is called"):
            metric(name)
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        metric("train/los")
