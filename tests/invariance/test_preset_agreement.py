"""Every policy-gradient preset against a simpler method that it must agree with: the first update's gradient, rollouts and all.

A run is made by its recipe, and its first gradient is kept before the optimizer sees it. Rollouts depend on the seed alone, so that
two methods see the same ones; at the first update the ratio is 1 and the policy is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from burnish.api import Trainer
from burnish.config.load import load_recipe
from burnish.config.presets import POLICY_GRADIENTS
from burnish.models.scratch import build
from burnish.monitor.rollouts import read_rollouts

RECIPE = """
name: first
model:
  scratch:
    alphabet: "0123456789>"
    config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}
tasks: {source: {ref: copy_digits, length: 2}}
rewards: [{fn: positions, isolate: false}]
sampling: {max_new_tokens: 2}
train: {steps: 1, prompts_per_step: 6, samples_per_prompt: 12}
monitor: {sinks: []}
"""
ONE_TOKEN = ("tasks.source.length=1", "sampling.max_new_tokens=1")
ONE_GROUP = ("train.prompts_per_step=1", "train.samples_per_prompt=64")
ONE_UPDATE = "train.minibatches=1"
TEACHER = "{{model: {{scratch: {{alphabet: '0123456789>', config: {config}}}}}{weight}}}"
STRONG = "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, initializer_range: 0.5}"
SELF = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"

Gradient = dict[str, torch.Tensor]


@pytest.fixture
def first(tmp_path, monkeypatch):
    """first(preset, *sets) -> (gradient of the first update, the run's folder); update=1: of the second, with weights that stayed."""
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text(RECIPE)
    Path("shifted.py").write_text("def positions_less_one(rollout, task):\n    return float(rollout.text == task.answer) - 1\n")

    def run(preset: str, *sets: str, update: int = 0) -> tuple[Gradient, Path]:
        seen: list[Gradient] = []

        def keep(state, finite, tally, **_):
            seen.append({name: m.grad.clone() for name, m in state.weights.masters.items() if m.grad is not None})
            state.weights.clear_grads()
            return True

        monkeypatch.setattr("burnish.trainer.step._apply", keep)
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        Trainer(load_recipe("first.yaml", sets=[f"preset={preset}", *sets], note=lambda line: None), out=folder).run()
        return (seen[update] if seen else {}), folder
    return run


def rewards_of(folder: Path) -> torch.Tensor:
    """[groups, samples]"""
    groups = read_rollouts(folder / "rollouts")
    return torch.tensor([[item.reward for item in group.scored] for group in groups], dtype=torch.float64)


def assert_same(one: Gradient, other: Gradient, *, factor: float = 1.0, rtol: float = 1e-4) -> None:
    """one = factor * other for the weights of the policy's body, of which some have a gradient."""
    assert any(float(g.abs().max()) > 1e-6 for g in other.values())
    largest = max(float(g.abs().max()) for g in other.values()) * factor
    for name in other:
        torch.testing.assert_close(one[name], factor * other[name], rtol=rtol, atol=rtol * largest, msg=lambda m, name=name: f"{name}: {m}")


@dataclass(frozen=True)
class Same:
    """preset with `sets` has `factor` times the gradient of the preset `of` with `than`; `both` stands in both runs."""

    of: str = "reinforce"
    than: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    factor: float = 1.0
    rtol: float = 1e-4


def like(advantage: str, reduce: str) -> tuple[str, ...]:
    return (f"algo.advantage={advantage}", f"algo.reduce={reduce}")


SIMPLER = {
    "reinforce": Same(than=("algo.loss=importance_sampling",)),
    "reinforce_ema": Same("reinforce_batch_mean"),                                  # its first baseline is the step's mean
    "rloo": Same(than=("algo.advantage=center",), factor=12 / 11),
    "sequence_ppo": Same("rloo", sets=(ONE_UPDATE,)),
    "opo": Same(than=("algo.advantage=center",), both=ONE_TOKEN),                     # all of one length
    "grpo": Same(than=like("standardize", "rollout_mean")),
    "grpo_process": Same("grpo"),                                                   # rewards of whole answers are those of one step
    "dr_grpo": Same(than=("algo.advantage=center",), sets=("algo.reduce.length=4",), factor=1 / 4),
    "dapo": Same(
        "grpo", than=("algo.kl=null", "algo.reduce=token_mean"), both=("train.samples_per_prompt=64",),
        sets=("algo.length_penalty.max_tokens=100", "algo.length_penalty.cache_tokens=10", ONE_UPDATE),
    ),
    "cispo": Same(than=like("standardize", "token_mean"), sets=(ONE_UPDATE,)),
    "sapo": Same(than=like("standardize", "rollout_mean"), sets=(ONE_UPDATE,)),
    "dppo": Same(than=like("center", "token_mean"), sets=(ONE_UPDATE,)),
    "gdpo": Same("grpo", than=("algo.kl=null",), sets=("algo.advantage.weights=[1.0]",), both=ONE_GROUP, rtol=1e-3),
    "gspo": Same(than=like("standardize", "rollout_mean"), sets=(ONE_UPDATE,)),
    "gspo_token": Same(than=like("standardize", "rollout_mean"), sets=(ONE_UPDATE,)),
    "gmpo": Same(than=like("standardize", "rollout_mean"), sets=(ONE_UPDATE,)),
    "reinforce_pp": Same(than=("algo.advantage={ref: standardize, eps: 0.0}",), both=(*ONE_TOKEN, *ONE_GROUP)),
    "reinforce_pp_baseline": Same("reinforce_pp", both=ONE_GROUP),
    "ppo": Same("reinforce_pp", sets=("algo.advantage.lam=1.0", ONE_UPDATE)),        # a critic that says 0, without discount
    "ppo_head": Same("reinforce_pp", sets=("algo.advantage.lam=1.0", ONE_UPDATE)),
    "decoupled_ppo": Same("grpo", than=("algo.kl=null", "algo.reduce=token_mean"), sets=(ONE_UPDATE,)),
    **{name: Same("grpo", than=("algo.correction=null",)) for name in ("grpo_tis", "grpo_icepop", "grpo_mis", "grpo_geometric_mis")},
    "opd": Same(
        "opd", than=("algo.loss=reinforce", f"distill.teachers=[{TEACHER.format(config=STRONG, weight='')}]"),
        sets=(f"distill.teachers=[{', '.join(TEACHER.format(config=STRONG, weight=f', weight: {w}') for w in (1.0, 3.0))}]",),
    ),
    "safe_rlhf": Same(
        than=like("standardize", "token_mean"), sets=("rewards.1={fn: exact, cost: true, isolate: false}", "constraint.limit=1.0"),
    ),
}
BY_HAND = {"reinforce_batch_mean", "remax", "gpg", "grpo_batch_std"}


def test_every_preset_is_compared():
    assert SIMPLER.keys() | BY_HAND == POLICY_GRADIENTS.keys()


@pytest.mark.parametrize("preset", SIMPLER)
def test_it_agrees_with_a_simpler_method(first, preset):
    same = SIMPLER[preset]
    one, _ = first(preset, *same.sets, *same.both)
    other, folder = first(same.of, *same.than, *same.both)
    if preset == "dapo":
        rewards = rewards_of(folder)
        assert (rewards.max(1).values > rewards.min(1).values).all()                  # nothing to refill
    assert_same(one, other, factor=same.factor, rtol=same.rtol)


def test_the_mean_of_one_group_is_the_mean_of_the_step(first):
    one, _ = first("reinforce_batch_mean", *ONE_GROUP)
    other, _ = first("reinforce", "algo.advantage=center", *ONE_GROUP)
    assert_same(one, other)


def test_groups_without_signal_do_not_dilute_gpg(first):
    sets = ("train.samples_per_prompt=3", "train.prompts_per_step=10")
    one, folder = first("gpg", *sets)
    rewards = rewards_of(folder)
    flat = (rewards.max(1).values == rewards.min(1).values).double().mean()
    assert 0 < flat < 1
    other, _ = first("reinforce", *like("center", "token_mean"), *sets)
    assert_same(one, other, factor=1 / (1 - float(flat)))


def test_the_deviation_of_the_step_is_one_factor(first):
    one, folder = first("grpo_batch_std")
    other, _ = first("reinforce", *like("center", "token_mean"))
    assert_same(one, other, factor=1 / (float(rewards_of(folder).std()) + 1e-4))


@pytest.mark.parametrize("digit", "0123456789")
def test_remax_is_reinforce_above_what_the_most_probable_answer_earns(first, digit):
    sets = (*ONE_TOKEN, *ONE_GROUP, f"tasks.source.alphabet='{digit}'")
    one, _ = first("remax", *sets)
    module, tokenizer = build(load_recipe("first.yaml").model.scratch, seed=0)
    most = module(torch.tensor([tokenizer.encode(f"{digit}>")])).logits[0, -1].argmax()
    right = tokenizer.decode([most]) == digit
    other, _ = first("reinforce", *sets, *(["rewards.0.fn=shifted:positions_less_one"] if right else []))
    assert_same(one, other)


def test_a_teacher_that_is_the_policy_teaches_nothing(first):
    one, _ = first("opd", f"distill.teachers=[{TEACHER.format(config=SELF, weight='')}]")
    assert all(float(g.abs().max()) < 1e-6 for g in one.values())


def test_a_cost_above_its_limit_changes_the_direction(first):
    """The agreement above is one of a multiplier at 0, not of a constraint that is never read."""
    cost = ("rewards.1={fn: exact, cost: true, isolate: false}", "train.steps=2", *ONE_TOKEN)
    free, _ = first("safe_rlhf", *cost, "constraint.limit=1.0", update=1)
    held, _ = first("safe_rlhf", *cost, "constraint.limit=0.0", "constraint.kp=100.0", update=1)
    assert float(sum((free[n] * held[n]).sum() for n in free)) < 0        # the cost is the reward itself here: the other way
