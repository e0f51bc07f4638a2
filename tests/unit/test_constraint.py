"""The multiplier of a cost constraint: by hand, on a simulated plant, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from burnish.algorithms.constraint import PidMultiplier, penalized


def run(control, *, base, steps=400, cost=3.0, inertia=0.7):
    """Mean costs a step of a policy whose cost drifts towards base / (1 + multiplier)."""
    costs = []
    for _ in range(steps):
        multiplier = control.update(cost)
        assert multiplier >= 0
        cost = inertia * cost + (1 - inertia) * base / (1 + multiplier)
        costs.append(cost)
    return costs


def test_penalized_by_hand():
    adv, cost = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.0])
    assert torch.equal(penalized(adv, cost, 0.0), adv)
    assert penalized(adv, cost, 3.0).tolist() == [-0.125, -0.25]
    torch.testing.assert_close(penalized(adv, cost, 1e9), -cost, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="negative one would reward"):
        penalized(adv, cost, -0.1)


def test_three_updates_by_hand():
    control = PidMultiplier(limit=1.0, kp=1.0, ki=0.5, kd=2.0)
    assert control.update(2.0) == 1.0 + 0.5                      # e 1, I 1, nothing to compare the cost with
    assert control.update(3.0) == 2.0 + 0.5 * 3 + 2.0 * 1
    assert control.update(1.5) == 0.5 + 0.5 * 3.5                # the cost fell: no derivative
    assert control.update(-9.0) == 0.0 and control.integral == 0.0


def test_with_the_integral_alone_it_is_dual_ascent():
    control, multiplier = PidMultiplier(limit=1.0, kp=0.0, ki=0.1, kd=0.0), 0.0
    for cost in (3.0, 0.0, 0.0, 0.0, 0.0, 2.0):
        multiplier = max(multiplier + 0.1 * (cost - 1.0), 0.0)
        assert control.update(cost) == pytest.approx(multiplier)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_it_settles_where_the_cost_meets_the_limit_and_follows_a_change(smoothing):
    control = PidMultiplier(limit=1.0, kp=0.5, ki=0.1, kd=0.1, smoothing=smoothing)
    costs = run(control, base=3.0)
    assert costs[-1] == pytest.approx(1.0, rel=0.01) and control.multiplier == pytest.approx(2.0, rel=0.02)
    costs = run(control, base=6.0, cost=costs[-1])
    assert max(costs) > 1.1
    assert costs[-1] == pytest.approx(1.0, rel=0.01) and control.multiplier == pytest.approx(5.0, rel=0.02)
    assert run(control, base=0.5, cost=costs[-1])[-1] == pytest.approx(0.5, rel=0.01)
    assert control.multiplier == 0                               # a constraint that holds by itself costs nothing


def test_the_proportional_term_damps_the_integral():
    alone = run(PidMultiplier(limit=1.0, kp=0.0, ki=0.3, kd=0.0), base=3.0)
    damped = run(PidMultiplier(limit=1.0, kp=1.0, ki=0.3, kd=0.0), base=3.0)
    assert sum(abs(c - 1) for c in damped) < 0.7 * sum(abs(c - 1) for c in alone)


def test_the_derivative_answers_a_rising_cost_before_the_limit_is_reached():
    control = PidMultiplier(limit=1.0, kp=0.0, ki=0.0, kd=1.0)
    assert [control.update(cost) for cost in (0.2, 0.6, 0.6, 0.1)] == [0.0, pytest.approx(0.4), 0.0, 0.0]


def test_a_long_time_at_the_bound_leaves_nothing_to_unwind():
    control = PidMultiplier(limit=1.0, kp=0.0, ki=0.5, kd=0.0, max_multiplier=2.0)
    assert [control.update(5.0) for _ in range(50)][-1] == 2.0
    assert control.update(0.0) == 1.5


def test_smoothing_averages_the_error_and_the_cost():
    control = PidMultiplier(limit=0.0, kp=1.0, ki=0.0, kd=1.0, smoothing=0.5)
    assert [control.update(cost) for cost in (1.0, 3.0, 0.0)] == [1.0, 2.0 + 1.0, 1.0]


def test_it_resumes_from_its_state():
    control = PidMultiplier(limit=1.0, kp=0.5, ki=0.1, kd=0.3, smoothing=0.3, max_multiplier=4.0)
    run(control, base=4.0, steps=5)
    again = PidMultiplier(**json.loads(json.dumps(asdict(control))))
    assert again.multiplier == control.multiplier > 0
    assert run(again, base=4.0, steps=20) == run(control, base=4.0, steps=20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kp": -1.0}, "kp is -1.0"), ({"kp": 0.0, "ki": 0.0, "kd": 0.0}, "all 0"), ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"max_multiplier": 0.0}, "max_multiplier is 0.0"),
    ],
)
def test_senseless_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PidMultiplier(**{"limit": 1.0, "kp": 1.0, "ki": 1.0, "kd": 0.0, **values})


@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_a_cost_that_is_no_number_leaves_the_state_alone(cost):
    control = PidMultiplier(limit=1.0, kp=1.0, ki=1.0, kd=1.0)
    control.update(2.0)
    before = asdict(control)
    with pytest.raises(ValueError, match="mean cost is"):
        control.update(cost)
    assert asdict(control) == before
