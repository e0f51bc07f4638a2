"""T22: each task once an epoch, in an order that depends on seed and epoch only; train and held-out share no prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from burnish.data.tasks import Cursor, canonical, split, task_id
from burnish.types import Task

ROOT = Path(__file__).parents[2]


def make(n: int, head: str = "task") -> list[Task]:
    return [Task(id=task_id(f"{head} {i}", "test"), prompt=f"{head} {i}", answer=i) for i in range(n)]


def ids(tasks) -> list[str]:
    return [t.id for t in tasks]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 25])
def test_each_task_once_an_epoch_however_they_are_taken(shuffle, chunk):
    tasks = make(7)
    cursor = Cursor(tasks, seed=3, shuffle=shuffle)
    taken: list[Task] = []
    while len(taken) < 70:
        taken += cursor.next(chunk)
        assert cursor.position == len(taken) and cursor.epoch == len(taken) // 7
    for epoch in range(10):
        assert sorted(ids(taken[epoch * 7 : epoch * 7 + 7])) == sorted(ids(tasks))
    whole = Cursor(tasks, seed=3, shuffle=shuffle).next(70)
    assert ids(taken[:70]) == ids(whole)


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20, 50])
def test_position_is_the_whole_state(position):
    tasks = make(7)
    whole = Cursor(tasks, seed=5, shuffle=True).next(80)
    resumed = Cursor(tasks, seed=5, shuffle=True, position=position)
    assert ids(resumed.next(3) + resumed.next(27)) == ids(whole[position : position + 30])


def test_orders_differ_between_epochs_and_seeds_and_ignore_the_order_of_the_source():
    tasks = make(40)
    orders = {tuple(ids(Cursor(tasks, seed=seed, shuffle=True, position=40 * epoch).next(40))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert ids(Cursor(tasks[::-1], seed=1, shuffle=True).next(40)) == ids(Cursor(tasks, seed=1, shuffle=True).next(40))
    assert ids(Cursor(tasks, seed=1, shuffle=False).next(80)) == ids(tasks + tasks)


def test_a_shuffle_is_even():
    """Over many epochs each task stands in the first half as often as in the second."""
    tasks = make(20)
    cursor = Cursor(tasks, seed=0, shuffle=True)
    first = dict.fromkeys(ids(tasks), 0)
    for _ in range(400):
        for task in cursor.next(20)[:10]:
            first[task.id] += 1
    assert all(150 < count < 250 for count in first.values())  # 5 standard deviations


def test_same_ids_split_and_order_in_another_process():
    code = (
        "from tests.unit.test_tasks import *\n"
        "s = split(make(50), held_out=10, seed=4)\n"
        "print(ids(s.held_out), ids(Cursor(s.train, seed=4, shuffle=True).next(60)))"
    )
    seen = {
        subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    parts = split(make(50), held_out=10, seed=4)
    assert seen == {f"{ids(parts.held_out)} {ids(Cursor(parts.train, seed=4, shuffle=True).next(60))}\n"}


def test_pinned_id():
    assert task_id("312>", "reverse") == "a9478162f2938b93"


@pytest.mark.parametrize("seed", range(20))
def test_split_is_disjoint_and_complete_under_any_seed(seed):
    tasks = make(30) + make(30)[::-1] + [Task(id="other id", prompt="task 3", answer="another")]
    parts = split(tasks, held_out=10, seed=seed)
    train, held_out = {canonical(t.prompt) for t in parts.train}, {canonical(t.prompt) for t in parts.held_out}
    assert len(parts.train) == len(train) == 20 and len(parts.held_out) == len(held_out) == 10
    assert not train & held_out
    assert train | held_out == {canonical(t.prompt) for t in tasks}
    assert parts.num_duplicates == 31


def test_the_side_of_a_prompt_does_not_depend_on_order_and_changes_with_the_seed():
    tasks = make(30)
    sides = [frozenset(ids(split(order, held_out=10, seed=seed).held_out)) for seed in range(3) for order in (tasks, tasks[::-1])]
    assert sides[0] == sides[1] and sides[2] == sides[3] and len(set(sides)) == 3


def test_equal_texts_and_equal_conversations_are_one_prompt():
    user = {"role": "user", "content": "hi"}
    tasks = [Task("1", "hi"), Task("2", "hi "), Task("3", (user,)), Task("4", (dict(reversed(user.items())),)), Task("5", (user, user))]
    parts = split(tasks, held_out=0, seed=0)
    assert ids(parts.train) == ["1", "2", "3", "5"] and parts.num_duplicates == 1 and parts.held_out == ()


@pytest.mark.parametrize(("tasks", "held_out", "message"), [
    ([], 0, "returned no tasks"),
    (make(5), 5, "held_out is 5, but the source has 5 distinct prompts"),
    (make(3) + make(3), 4, "has 3 distinct prompts among its 6 tasks"),
    (make(5), -1, "at least 0"),
])
def test_a_split_that_cannot_be_made_is_refused(tasks, held_out, message):
    with pytest.raises(ValueError, match=message):
        split(tasks, held_out=held_out, seed=0)


def test_a_source_that_returns_something_else_is_refused():
    with pytest.raises(TypeError, match="item 1 of the task source is a dict"):
        split([*make(1), {"prompt": "x"}], held_out=0, seed=0)


def test_a_cursor_without_tasks_or_with_a_negative_position_is_refused():
    with pytest.raises(ValueError, match="at least one task"):
        Cursor([], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="negative"):
        Cursor(make(2), seed=0, shuffle=True, position=-1)


def test_ids_that_clash_or_are_no_text_are_refused():
    with pytest.raises(ValueError, match="two tasks with different prompts have the id '0'"):
        split([Task("0", "a"), Task("1", "b"), Task("0", "c")], held_out=1, seed=0)
    with pytest.raises(TypeError, match="an id is a text"):
        split([Task(0, "a"), Task(1, "b")], held_out=1, seed=0)
    assert len(split([Task("0", "a"), Task("0", "a"), Task("1", "b")], held_out=1, seed=0).train) == 1
