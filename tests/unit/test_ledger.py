"""The time ledger: parts and rest sum to the step exactly, and no second counts twice."""

import time

import pytest

from burnish.monitor.ledger import Clock, total


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_phases_and_rest_by_hand():
    hand = Hand()
    clock = Clock(hand)
    with clock.phase("generate"):
        hand.now_s += 2
    hand.now_s += 0.5
    with clock.phase("train"):
        hand.now_s += 3
    with clock.phase("generate"):
        hand.now_s += 1
    assert clock.cut() == {"time/generate_s": 3.0, "time/train_s": 3.0, "time/other_s": 0.5, "time/step_s": 6.5}
    hand.now_s += 1
    assert clock.cut() == {"time/other_s": 1.0, "time/step_s": 1.0}


def test_nested_phases_count_for_the_outer_one():
    hand = Hand()
    clock = Clock(hand)
    with clock.phase("evaluate"):
        hand.now_s += 1
        with clock.phase("generate"):
            hand.now_s += 2
        hand.now_s += 4
    assert clock.cut() == {"time/evaluate_s": 7.0, "time/other_s": 0.0, "time/step_s": 7.0}


def test_an_open_phase_is_split_by_a_cut():
    hand = Hand()
    clock = Clock(hand)
    with clock.phase("checkpoint"):
        hand.now_s += 1
        first = clock.cut()
        hand.now_s += 2
    second = clock.cut()
    assert first["time/checkpoint_s"] == 1.0 and second["time/checkpoint_s"] == 2.0
    assert first["time/other_s"] == second["time/other_s"] == 0.0


def test_a_block_that_raises_is_counted():
    hand = Hand()
    clock = Clock(hand)
    with pytest.raises(RuntimeError), clock.phase("train"):
        hand.now_s += 2
        raise RuntimeError
    assert clock.cut()["time/train_s"] == 2.0


def test_real_times_sum_without_any_rounding():
    clock = Clock()
    rows = []
    for step in range(50):
        for phase in ("generate", "reward", "train"):
            with clock.phase(phase):
                time.sleep(0.0001 * (step % 3))
        rows.append(clock.cut())
    for row in rows:
        parts = [v for k, v in row.items() if k != "time/step_s"]
        assert sum(parts) == sum(reversed(parts)) == row["time/step_s"]
        assert all(v >= 0 for v in parts)
    whole = total(rows)
    assert whole.pop("step") == sum(whole.values())


def test_names_that_the_clock_computes_are_refused():
    with pytest.raises(ValueError, match="other"), Clock().phase("other"):
        pass
