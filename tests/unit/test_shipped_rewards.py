"""exact, last_number and reasoning_gym: the right answer earns 1, an empty one does not, and the policy's text is never run."""

from __future__ import annotations

import importlib.util
import random
from decimal import Decimal

import pytest

from burnish.config import Reward
from burnish.data import sources
from burnish.ref import Ref
from burnish.rewards import exact, last_number
from burnish.rewards.pool import RewardPool
from burnish.rewards.text import find_last_number
from burnish.types import Rollout, Task, Turn

needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


def rollout(text: str, task: Task) -> Rollout:
    return Rollout(task, 0, (1,), (True,), (0.0,), (Turn("policy", 0, 1, text),), "end_token", 0)


def score(reward, text: str, answer, **values) -> float | None:
    task = Task("t", "p", answer)
    return reward(rollout(text, task), task, **values)


@pytest.mark.parametrize(("text", "answer", "strict", "loose"), [
    ("213", "213", 1, 1), (" 213\n", "213", 1, 1), ("213", 213, 1, 1), ("2.5", 2.5, 1, 1), ("", "213", 0, 0), ("2130", "213", 0, 0),
    ("Yes.", "yes", 0, 1), ("a  b", "a b", 0, 1), ("a b", "ab", 0, 0), ("", "", 1, 1),
])
def test_exact(text, answer, strict, loose):
    assert (score(exact, text, answer), score(exact, text, answer, strict=False)) == (strict, loose)


@pytest.mark.parametrize(("text", "number"), [
    ("The answer is 42.", "42"), ("12 apples and 7", "7"), ("7\n\nBut 8", "8"), ("1 2 3", "3"), ("5, 6", "6"), ("5,", "5"), ("10km", "10"),
    ("-7", "-7"), ("3-2", "2"), ("3 - 2", "2"), ("x=-5", "-5"), ("(-5)", "-5"), ("f(3)-5", "5"), ("\u22125", "-5"), ("+5", "5"),
    ("1,234", "1234"), ("1,234,567.89!", "1234567.89"), ("1,2,3", "3"), ("1,23", "23"), ("12,345,6", "6"),
    ("$1,200", "1200"), ("-$5", "-5"), ("$-5", "-5"), ("50%", "50"), ("3/4", "4"), ("v2.0", "2.0"),
    (".5", "0.5"), ("0.50", "0.5"), ("3.14.15", "3.14"), ("2e3", "2000"), ("1.5e-2", "0.015"), ("2e", "2"), ("1e9999", "9999"),
    ("\u0663", None), ("no", None), ("", None), ("-", None),
])
def test_last_number_is_found(text, number):
    found = find_last_number(text)
    assert found == (None if number is None else Decimal(number))


@pytest.mark.parametrize(("text", "answer", "value", "strict"), [
    ("so 1,000", "1000", 1, 0), ("1000", 1000, 1, 1), ("1000.0", 1000, 1, 1), ("0.1", 0.1, 1, 1), ("0.10000000000000001", 0.1, 0, 0),
    ("4 or 5", "5", 1, 0), ("5 or 4", "5", 0, 0), ("", "5", 0, 0), (" -3 ", "-3", 1, 1), ("9" * 50, "9" * 50, 1, 1),
    ("9" * 49 + "8", "9" * 50, 0, 0),
])
def test_last_number(text, answer, value, strict):
    assert (score(last_number, text, answer), score(last_number, text, answer, strict=True)) == (value, strict)


def test_last_number_within_a_tolerance():
    assert [score(last_number, text, 0.3, tolerance=0.01) for text in ("0.29", "0.31", "0.2899", "0.32")] == [1, 1, 0, 0]


@pytest.mark.parametrize(("reward", "answer"), [
    (exact, None), (exact, ["a"]), (exact, True), (last_number, None), (last_number, "seven"), (last_number, True),
])
def test_a_task_without_a_fitting_answer_is_an_error_not_a_wrong_answer(reward, answer):
    with pytest.raises(ValueError, match="task t"):
        score(reward, "7", answer)


def test_long_junk_is_read_in_linear_time():
    for junk in ("1," * 100_000, "-" * 200_000, "1" * 200_000 + "x", "1,111" * 50_000, "." * 200_000, "1.1" * 60_000):
        find_last_number(junk)   # a backtracking pattern would take minutes


DATASETS = [
    "chain_sum", "countdown", "puzzle24", "simple_integration", "string_insertion", "n_queens", "spiral_matrix", "binary_matrix", "rearc",
    "polynomial_multiplication", "game_of_life_halting", "prime_factorization", "complex_arithmetic", "intermediate_integration",
    "letter_counting",
]
CODE = [
    "__import__('pathlib').Path({out!r}).touch()", "[__import__('pathlib').Path({out!r}).touch()]", "[*map(open, [{out!r}], 'w')]",
    "(lambda: open({out!r}, 'w'))()", "open({out!r}, 'w')", "f'{{open({out!r}, \"w\")}}'",
    "S(\"__import__('pathlib').Path({out!r}).touch()\")",
]


@pytest.fixture(scope="module")
def gym():
    """A task of each dataset, and a pool to score it."""
    tasks = sources.reasoning_gym(DATASETS, size=5 * len(DATASETS), seed=2)
    with RewardPool([Reward(fn=Ref("reasoning_gym"), timeout_s=5)]) as pool:
        def score(pairs):
            return pool.score([rollout(text, task) for task, text in pairs])

        yield tasks, score


@needs_gym
def test_the_reference_answer_earns_everything_and_an_empty_one_nothing(gym):
    tasks, score = gym
    assert [(s.rollout.task.info["dataset"], s.reward) for s in score([(t, f" {t.answer}\n") for t in tasks]) if s.reward != 1.0] == []
    assert {s.reward for s in score([(t, "") for t in tasks])} == {0.0}


@needs_gym
def test_the_policys_text_is_never_run(gym, tmp_path):
    tasks, score = gym
    out = tmp_path / "created"
    found = score([(t, code.format(out=str(out))) for t in tasks[::5] for code in CODE])
    assert not out.exists()
    assert max(s.reward or 0.0 for s in found) < 0.1


@needs_gym
@pytest.mark.parametrize("bomb", [
    "9**9**9**9", "(9**9)**9**9", "(((9**200)**200)**200)**200", "x**(9**9**9)", "exp(9**9**9)", "9**(9*9*9*9*9*9*9*9)", "(" * 5000,
])
def test_no_bomb_goes_off(gym, bomb):
    tasks, score = gym
    found = score([(t, bomb) for t in tasks[:: 5]])
    assert [s.errors for s in found if "TimeoutError" in str(s.errors) or "died" in str(s.errors)] == []


@needs_gym
def test_other_right_answers_still_earn_it(gym):
    tasks, score = gym
    first = {t.info["dataset"]: t for t in reversed(tasks)}
    integral, count, queens = first["simple_integration"], first["countdown"], first["n_queens"]
    pairs = [
        (integral, integral.answer.replace("+ C", "+ 7")),
        (count, f"({count.answer})"),
        (queens, queens.info["entry"]["metadata"]["valid_answers"][-1]),
        (first["string_insertion"], str(list(first["string_insertion"].answer))),
        (first["polynomial_multiplication"], f"1*({first['polynomial_multiplication'].answer})"),
    ]
    assert [s.reward for s in score(pairs)] == [1.0, 1.0, 1.0, 0.1, 1.0]


@needs_gym
def test_where_the_library_pays_for_nothing(gym):
    tasks, score = gym
    first = {t.info["dataset"]: t for t in tasks}
    life, number, integral = first["game_of_life_halting"], first["complex_arithmetic"], first["intermediate_integration"]
    wrong = {"True": "False", "False": "True"}[str(life.answer)]
    pairs = [
        (life, wrong), (life, "anything"), (life, str(life.answer).lower()), (number, "nan"), (number, "nan + infi"),
        (integral, f"Integral({integral.info['entry']['metadata']['integrand']}, {integral.info['entry']['metadata']['variable']})"),
    ]
    assert [s.reward for s in score(pairs)] == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@needs_gym
def test_arguments(gym):
    tasks, _ = gym
    first = {t.info["dataset"]: t for t in tasks}
    total, primes = first["chain_sum"], first["prime_factorization"]
    from burnish.rewards import reasoning_gym

    def score(text, task, **values):
        return reasoning_gym(rollout(text, task), task, **values)

    right = total.answer
    assert 0 < score(f"it is {right}", total) < 1 and score(f"it is {right}", total, strict=True) == 0.0
    assert score(f"it is {right}.", total, find="last_number") == 1.0
    assert score(f"{right}\nQ: what next?", total, find="first_line") == 1.0
    assert score(f"thinking\n{right}", total, find="last_line") == 1.0
    assert score(f"<answer>0</answer> no, <answer> {right} </answer>.", total, find="tag") == 1.0
    assert score(right, total, find="tag") == 0.0
    with pytest.raises(ValueError, match="invalid literal"):
        score("junk", primes)
    assert score("junk", primes, unreadable=0.0) == 0.0
    with pytest.raises(ValueError, match="it is one of"):
        score(right, total, find="everywhere")
    with pytest.raises(ValueError, match="does not come from reasoning-gym"):
        score("7", Task("t", "p", "7"))


def test_the_short_names_work_in_a_worker():
    digits = random.Random(0).sample(sources.reverse_digits(length=3), 20)
    with RewardPool([Reward(fn=Ref("exact")), Reward(fn=Ref("last_number", {"strict": True}), weight=0.5)]) as pool:
        found = pool.score([rollout(t.answer if n % 2 else t.prompt, t) for n, t in enumerate(digits)])
    assert [s.reward for s in found] == [1.5 if n % 2 else 0.0 for n in range(20)]
