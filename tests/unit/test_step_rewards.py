"""Rewards of steps from the function to the advantages, rewards that take many rollouts, classes, names and running normalisation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import tiny

from burnish.algorithms.advantages import gae, returns_to_go, standardize, standardize_steps
from burnish.algorithms.returns import soft_overlong
from burnish.algorithms.running import RunningNorm
from burnish.config import Reward
from burnish.config.errors import SettingsError
from burnish.monitor.rollouts import read_rollouts, write_rollouts
from burnish.plan.preflight import check
from burnish.ref import Ref, RefError
from burnish.rewards.pool import Reading, RewardPool
from burnish.rewards.steps import last_tokens
from burnish.rollout import assemble
from burnish.types import Group, Rollout, Scored, Task, Turn

PIECES = ["<end>", "p", "ab", "c", "def", "\ufffd", "\n", "gh"]


def decode(tokens) -> str:
    """Token 5 is half of an e with an accent: two of them make it, one alone is no character."""
    return "".join(PIECES[t] for t in tokens).replace("\ufffd\ufffd", "\u00e9")


def rollout(*turns: tuple[str, list[int]], stop: str = "end_token", cut: int = 1, sample: int = 0, answer=None) -> Rollout:
    """turns: (author, tokens); the last `cut` tokens of each of the policy's turns are not part of its text."""
    made, tokens = [Turn("prompt", 0, 1, "p")], [1]
    sampled = [False]
    for author, part in turns:
        text = decode(part[:-cut] if author == "policy" and cut else part)
        made.append(Turn(author, len(tokens), len(tokens) + len(part), text))
        tokens += part
        sampled += [author == "policy"] * len(part)
    return Rollout(Task(f"t{sample}", "p", answer), sample, tuple(tokens), tuple(sampled), (0.0,) * len(tokens), tuple(made), stop, 0)


# characters to tokens

def test_the_last_token_of_each_step():
    one = rollout(("policy", [2, 3, 4, 0]))                       # "ab" "c" "def" <end>
    assert one.text == "abcdef"
    assert last_tokens(one, [1, 2, 3, 4, 5, 6], decode) == [1, 1, 2, 3, 3, 4], "the last step takes the end token with it"
    cut_off = rollout(("policy", [2, 3, 4]), cut=0, stop="max_tokens")
    assert last_tokens(cut_off, [3, 6], decode) == [2, 3]


def test_a_character_of_several_tokens_ends_with_its_last_one():
    one = rollout(("policy", [2, 5, 5, 3, 0]))                    # "ab" "é" in halves, "c"
    assert one.text == "ab\u00e9c"
    assert last_tokens(one, [2, 3, 4], decode) == [1, 3, 5]


def test_steps_run_over_all_turns_of_the_policy():
    one = rollout(("policy", [2, 0]), ("env", [6, 7]), ("policy", [3, 4, 0]))
    assert last_tokens(one, [1, 2, 3, 6], decode) == [1, 2, 5, 7]
    with pytest.raises(ValueError, match="a step ends at character 7, but the policy wrote 6"):
        last_tokens(one, [7], decode)


# from the function to Scored

REWARDS = '''
made = []
def steps(rollout, task):
    return eval(rollout.task.answer)

def whole(rollout, task):
    return 2.0

def length(rollouts):
    made.append(len(rollouts))
    return [float(len(r.text)) for r in rollouts]

def calls(rollouts):
    return [len(made) + len(rollouts)] * len(rollouts)

def short(rollouts):
    return [1.0]

def some(rollouts):
    return [ValueError("unreadable") if r.text == "c" else None if r.text == "ab" else 1.0 for r in rollouts]

async def later(rollouts):
    return [1.0] * len(rollouts)

def hangs(rollouts):
    import time
    time.sleep(60)

def both(rollout, rollouts):
    return 1.0

class Scaled:
    built = 0
    def __init__(self, by):
        if by < 0:
            raise ValueError(f"by is {by}; it is not negative")
        Scaled.built += 1
        self.by, self.loaded = by, 0
    def load(self):
        self.loaded += 1
    def __call__(self, rollout, task):
        assert (Scaled.built, self.loaded) == (1, 1)
        return self.by * len(rollout.text)

class Many(Scaled):
    def __call__(self, rollouts):
        return [self.by] * len(rollouts)
'''
TWO = Reading(decode)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "step_rewards.py"
    path.write_text(REWARDS)
    return path


def score(file, rollouts, *names, reading=TWO, isolate=False, **more):
    settings = [Reward(fn=Ref(f"{file}:{name}"), isolate=isolate, **more.get(name, {})) for name in names]
    with RewardPool(settings) as pool:
        return pool.score(rollouts, reading)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_list_of_steps_becomes_their_tokens_and_its_sum_the_score(file, isolate):
    texts = ["[(2, 0.1), [3, 0.2], (6, -1)]", "((6, True),)", "[]", "[(3, 0.5), (3, 0.5)]", "[(0, 1.0)]", "[(7, 1.0)]", "[(1.5, 1.0)]",
             "[(1, float('nan'))]", "[1.0]", "[(True, 1.0)]"]
    found = score(file, [rollout(("policy", [2, 3, 4, 0]), sample=i, answer=t) for i, t in enumerate(texts)], "steps", isolate=isolate)
    first, second, *wrong = found
    assert first.steps == ((1, 0.1), (2, 0.2), (4, -1.0))
    assert first.reward == first.scores["steps"] == math.fsum([0.1, 0.2, -1.0])
    assert (second.steps, second.reward) == (((4, 1.0),), 1.0)
    assert [s.reward for s in wrong] == [None] * 8 and [s.steps for s in wrong] == [()] * 8
    reasons = [next(iter(s.errors.values())) for s in wrong]
    assert reasons[0].startswith("TypeError: returned [] of type list; a reward returns a float")
    assert reasons[1] == "ValueError: returned steps that end at the characters [3, 3]; ends are at least 1 and increase"
    assert "characters [0]" in reasons[2]
    assert reasons[3] == "ValueError: a step ends at character 7, but the policy wrote 6"
    assert "of type list" in reasons[4] and "finite" in reasons[5] and "of type list" in reasons[6] and "of type list" in reasons[7]


def test_beside_steps_a_reward_of_the_whole_stands_at_the_last_token(file):
    one = rollout(("policy", [2, 3, 0]), answer="[(2, 1.0)]")
    more = {"steps": {"weight": 0.5}, "whole": {"weight": 3.0}}
    (found,) = score(file, [one], "steps", "whole", **more)
    assert found.steps == ((1, 0.5), (3, 6.0))
    assert found.reward == 6.5
    (cost,) = score(file, [one], "whole", "steps", steps={"cost": True})
    assert (cost.reward, cost.cost, cost.steps) == (2.0, 1.0, ())
    (blind,) = score(file, [one], "steps", reading=Reading())
    assert blind.reward is None and "Reading.decode" in blind.errors["steps"]


def test_a_reward_of_many_rollouts_is_called_once(file):
    rollouts = [rollout(("policy", [2, 0]), sample=0), rollout(("policy", [3, 0]), sample=1), rollout(("policy", [4, 0]), sample=2)]
    assert [s.scores for s in score(file, rollouts, "length", "calls")] == [
        {"length": 2.0, "calls": 4.0}, {"length": 1.0, "calls": 4.0}, {"length": 3.0, "calls": 4.0},
    ]
    assert [s.reward for s in score(file, rollouts, "length", isolate=True)] == [2.0, 1.0, 3.0], "in a worker one by one"
    assert [s.reward for s in score(file, rollouts, "later")] == [1.0] * 3
    assert {s.errors["short"] for s in score(file, rollouts, "short")} == {
        "ValueError: returned 1 values for 3 rollouts; it returns one a rollout, in their order"
    }
    found = score(file, rollouts, "some")
    assert [s.reward for s in found] == [None, None, 1.0]
    assert "could not be scored" in found[0].errors["some"] and found[1].errors["some"] == "ValueError: unreadable"
    assert score(file, [], "length") == []
    hung = score(file, rollouts[:2], "hangs", hangs={"timeout_s": 0.1})
    assert {s.errors["hangs"] for s in hung} == {"TimeoutError: no answer within 0.2 s; the call was abandoned in its thread"}
    with pytest.raises(RefError, match="a reward takes rollout and task, or the rollouts of a step at once"):
        score(file, rollouts, "both")


@pytest.mark.parametrize("isolate", [True, False])
def test_a_class_is_made_once_with_its_values(file, isolate):
    rollouts = [rollout(("policy", [2, 0]), sample=i) for i in range(3)]
    with RewardPool([Reward(fn=Ref(f"{file}:Scaled", {"by": 0.5}), isolate=True)]) as pool:
        assert [s.reward for s in pool.score(rollouts)] == [1.0] * 3
    with RewardPool([Reward(fn=Ref(f"{file}:Many", {"by": 0.5}), isolate=isolate)]) as pool:
        assert [s.reward for s in pool.score(rollouts)] == [0.5] * 3
    wrong = (({}, r"needs \['by'\]"), ({"bi": 1}, r"takes no \['bi'\]; it takes \['by'\]"), ({"by": -1}, "by is -1; it is not negative"))
    for values, message in wrong:
        with pytest.raises(RefError, match=message):
            RewardPool([Reward(fn=Ref(f"{file}:Scaled", values), isolate=isolate)])


def test_names_tell_two_uses_of_one_function_apart(file):
    rewards = [Reward(fn=Ref(f"{file}:Many", {"by": by}), name=name, isolate=False) for name, by in (("low", 1.0), ("high", 2.0))]
    with RewardPool(rewards) as pool:
        assert pool.score([rollout(("policy", [2, 0]))])[0].scores == {"low": 1.0, "high": 2.0}
    with pytest.raises(RefError, match=r"two rewards are called 'low'.*give one a name"):
        RewardPool([rewards[0], rewards[0]])


def test_running_normalisation_changes_the_reward_and_not_the_score(file):
    rollouts = [rollout(("policy", [t, 0]), sample=i) for i, t in enumerate((2, 3, 4))]
    norm, twin = RunningNorm(eps=1e-8, ddof=1), RunningNorm(eps=1e-8, ddof=1)
    reward = Reward(fn=Ref(f"{file}:some"), name="some", isolate=False), Reward(fn=Ref(f"{file}:length"), weight=2.0, isolate=False)
    expected = twin(torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)).tolist()
    with RewardPool(reward[1:]) as pool:
        found = pool.score(rollouts, Reading(decode, {"length": norm}, learns=True))
        assert [s.scores["length"] for s in found] == [2.0, 1.0, 3.0]
        assert [s.reward for s in found] == [2 * value for value in expected]
        assert [s.given for s in found] == [4.0, 2.0, 6.0]
        again = pool.score(rollouts[2:], Reading(decode, {"length": norm}))
        assert (norm.count, again[0].reward) == (3, found[2].reward), "statistics stand still outside of training"
        assert pool.score(rollouts)[2].reward == 6.0
    with RewardPool(reward[:1]) as pool:
        norm = RunningNorm(eps=1e-8, ddof=1, center=False)
        found = pool.score([*rollouts, rollouts[2]], Reading(decode, {"some": norm}, learns=True))
        assert (norm.count, [s.reward is None for s in found]) == (2, [True, True, False, False])
    with RewardPool([Reward(fn=Ref(f"{file}:steps"), isolate=False)]) as pool:
        one = rollout(("policy", [2, 0]), answer="[(1, 1.0)]")
        (found,) = pool.score([one], Reading(decode, {"steps": RunningNorm(eps=1e-8, ddof=1)}, learns=True))
        assert "which are not normalised; remove `normalize`" in found.errors["steps"]


NORM = {"ref": "RunningNorm", "eps": 1e-8, "ddof": 1}


@pytest.mark.parametrize(("changes", "message"), [
    ({"rewards.0.normalize": NORM, "algo.advantage": {"ref": "standardize_each", "weights": [1.0]}},
     r"rewards\.0\.normalize does nothing: algo\.advantage standardize_each reads scores as they were given"),
    ({"rewards.0.normalize": NORM, "loop": "sft", "algo": None, "sampling": {}, "train": {"steps": 1, "examples_per_step": 1},
      "data": {"source": {"ref": "of_tasks", "tasks": {"ref": "copy_digits", "length": 2}}}},
     r"rewards\.0\.normalize is for training rollouts, which loop: sft does not have"),
    ({"rewards.0.normalize": {**NORM, "eps": 0.0}}, r"rewards\.0\.normalize: RunningNorm: eps is 0\.0; it must be above 0"),
    ({"rewards.0.normalize": {"ref": "RunningNorm", "eps": 1e-8}}, r"needs \['ddof'\]"),
    ({"rewards.0.normalize": "RuningNorm"}, "did you mean 'RunningNorm'"),
    ({"rewards.0.normalize": "fractions:Fraction"}, "is no dataclass with update"),
])
def test_a_normalisation_that_does_nothing_or_cannot_is_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        check(tiny(changes))


def test_a_cost_keeps_its_unit():
    with pytest.raises(ValueError, match=r"a cost is compared with constraint\.limit and so keeps its unit"):
        tiny({"rewards.0.normalize": NORM, "rewards.0.cost": True})


# on disk, and to advantages

def test_cost_and_steps_come_back_from_the_file_without_loss(tmp_path):
    one, two = rollout(("policy", [2, 0])), rollout(("policy", [3, 0]), sample=1)
    stepped = Scored(one, 0.5, {"a": 0.5}, cost=0.1 + 0.2, steps=((1, 1 / 3), (2, -1e-300)), given=2 / 3)
    groups = [
        Group(one.task, (stepped, Scored(one, 0.0, {"a": 0.0}, cost=0.0))),
        Group(two.task, (Scored(two, 1.0, {"a": 1.0}), Scored(two, None, {"a": None}, {"a": "why"}))),
    ]
    write_rollouts(tmp_path / "step.parquet", 1, groups, lambda t: PIECES[t])
    assert read_rollouts(tmp_path / "step.parquet") == groups


STEPS = (((1, 1.0), (3, 0.0)), ((1, 0.0), (3, 0.5)))


def group_of(steps=STEPS, rewards=None):
    rollouts = [rollout(("policy", [2, 3, 0]), sample=i) for i in range(len(steps))]
    rewards = rewards or [sum(v for _, v in s) for s in steps]
    scored = (Scored(r, reward, {"a": reward}, steps=s) for r, reward, s in zip(rollouts, rewards, steps, strict=True))
    return Group(rollouts[0].task, tuple(scored))


def adv_of(groups, advantage, **given):
    return [list(row.columns["adv"]) for row in assemble(groups, advantage=advantage, **given).rows]


def test_standardized_steps_by_hand():
    """Steps 1, 0 | 0, 0.5 of one group have the mean 0.375 and the sample deviation 0.4787."""
    z = standardize(torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)).tolist()
    got = adv_of([group_of()], standardize_steps)
    assert got == [pytest.approx([0, z[0] + z[1], z[1], z[1]]), pytest.approx([0, z[2] + z[3], z[3], z[3]])]


def test_without_steps_they_are_the_standardized_rewards():
    group = group_of((((1, 1.0),), ((1, 0.0),)))
    plain = Group(group.task, tuple(replace(s, steps=()) for s in group.scored))
    assert adv_of([plain], standardize_steps) == adv_of([plain], standardize)


def test_a_length_penalty_stands_at_the_last_token():
    penalty = partial(soft_overlong, max_tokens=3, cache_tokens=2)          # -1 for three tokens
    whole = (((1, 1.0), (3, -1.0)), ((1, 0.0), (3, -0.5)))
    assert adv_of([group_of()], standardize_steps, length_penalty=penalty) == adv_of([group_of(whole)], standardize_steps)


def test_returns_to_go_and_gae_take_each_step_where_it_ends():
    assert adv_of([group_of()], returns_to_go) == [[0, 1.0, 0.0, 0.0], [0, 0.5, 0.5, 0.5]]
    with_rest = group_of(rewards=[3.0, 0.5])                                  # 2.0 belong to no step
    assert adv_of([with_rest], returns_to_go)[0] == [0, 3.0, 2.0, 2.0]
    value = [(0.0, 0.25, 0.5, 0.125)] * 2
    got = adv_of([group_of()], partial(gae, gamma=1.0, lam=0.0), value=value, bootstrap=[0.0, 0.0])
    assert got == [[0, 1.0 + 0.5 - 0.25, 0.125 - 0.5, -0.125], [0, 0.25, -0.375, 0.375]]


def test_a_cost_has_no_steps_of_the_reward():
    group = group_of()
    scored = tuple(replace(s, cost=c) for s, c in zip(group.scored, (1.0, 0.0), strict=True))
    got = adv_of([Group(group.task, scored)], returns_to_go, multiplier=1.0)
    assert got[0] == pytest.approx([0, (1.0 - 1.0) / 2, (0.0 - 1.0) / 2, (0.0 - 1.0) / 2])
