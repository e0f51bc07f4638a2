"""Each recipe for a CPU runs, and reaches what its `expect` says."""

from __future__ import annotations

import re

import pytest

from burnish.api import Trainer
from burnish.config import Settings
from burnish.config.load import dump, load_recipe, shipped
from burnish.config.presets import PREFERENCES
from burnish.monitor.writer import read_metrics

TINY = [info.name for info in shipped() if info.name.endswith("-tiny")]
LEARN_ELSEWHERE = {"from-scratch-tiny", *(f"{name.replace('_', '-')}-tiny" for name in PREFERENCES)}   # test_learning, test_preferences
METRICS = {
    "Reward": "rollout/reward_mean", "Held-out preference accuracy": "eval/preference_accuracy_frac",
    "Held-out accuracy": "eval/accuracy_frac", "Held-out rating error": "eval/rating_error_mean",
    "Held-out accuracy of classes": "eval/label_accuracy_frac", "Held-out accuracy of steps": "eval/step_accuracy_frac",
    "Held-out loss": "eval/loss_nats", "Held-out divergence": "eval/divergence_nats",
}
EXPECT = re.compile(r"(?P<what>[A-Z][a-z -]+?) from (?P<first>[\d.]+) to (?P<side>over|below) (?P<last>[\d.]+)[ ,.]")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def with_models(name: str, overrides) -> Settings:
    """The settings, once the models of other recipes that they read are there, made with the same overrides."""
    settings = load_recipe(name, overrides=overrides)
    for other in dict.fromkeys(re.findall(r"runs/([\w-]+)/model", dump(settings))):
        Trainer(load_recipe(other, overrides=overrides)).run()
    return settings


def curve(folder, metric: str) -> list[float]:
    return [row[metric] for row in read_metrics(folder) if metric in row]


@pytest.mark.parametrize("name", TINY)
def test_two_steps(name, tmp_path):
    settings = with_models(name, {"train.steps": 2, "evaluate.every_steps": 0, "monitor.sinks": []})
    done = Trainer(settings, out=tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == 2 and all(row.get("train/skipped_updates_count", 0) == 0 for row in rows)
    assert (done.model / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY if name not in LEARN_ELSEWHERE])
def test_it_reaches_what_it_says(name, tmp_path):
    """The mean of the first two and of the last five steps, or the first and the last evaluation."""
    settings = with_models(name, {"monitor.sinks": []})
    said = EXPECT.match(settings.expect)
    assert said, f"expect says no `{'`, `'.join(METRICS)} from X to over Y`: {settings.expect}"
    Trainer(settings, out=tmp_path / "run").run()
    values = curve(tmp_path / "run", METRICS[said["what"]])
    early, late = (2, 5) if METRICS[said["what"]].startswith("rollout/") else (1, 1)
    first, last = sum(values[:early]) / early, sum(values[-late:]) / late
    above = 1 if said["side"] == "over" else -1
    assert above * last > above * float(said["last"])
    assert abs(first - float(said["first"])) < 0.25 * abs(float(said["last"]) - float(said["first"])), (first, said[0])


@pytest.mark.slow
def test_the_cost_stays_at_its_limit(tmp_path):
    settings = load_recipe("safe-rlhf-tiny", overrides={"monitor.sinks": []})
    Trainer(settings, out=tmp_path / "run").run()
    costs = curve(tmp_path / "run", "rollout/cost_mean")
    assert max(costs) > 0.4
    assert sum(costs[-20:]) / 20 < settings.constraint.limit + 0.05
