"""T9: whatever a reward does, the pool answers in time, in order, and turns it into data on that rollout only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from burnish.config import Reward
from burnish.ref import Ref, RefError
from burnish.rewards.pool import RewardPool
from burnish.types import Rollout, Task, Turn

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.5

REWARDS = '''
import asyncio, os, re, subprocess, sys, threading, time
from fractions import Fraction

def by_text(rollout, task):
    """Does what the policy's text says."""
    text = rollout.text
    if text.startswith("return "):
        return eval(text.removeprefix("return "))
    return BEHAVIOURS[text]()

def add(n, to):
    return to + n

def half(rollout, task):
    return float(rollout.text.removeprefix("n")) / 2

def one(rollout):
    return 1

def scaled(rollout, task, *, by, table, name="x"):
    assert table == {"a": [1, 2]} and name == "y"
    return by * len(rollout.text)

def loud(rollout, task):
    print("printed by the reward", flush=True)
    os.write(1, b"written to the file descriptor\\n")
    return 1.0

def reads_stdin(rollout, task):
    return len(sys.stdin.read())

def whole_record(rollout, task):
    import json
    from burnish.types import Rollout, Task, Turn
    assert type(rollout) is Rollout and type(task) is Task and type(rollout.turns[0]) is Turn and rollout.task is task
    with open(task.info["out"], "w") as file:
        file.write(repr(rollout))
    return 1.0

def process_id(rollout, task):
    return os.getpid()

async def slow_async(rollout, task):
    await asyncio.sleep(0.2)
    return 0.25

async def async_hang(rollout, task):
    if rollout.text == "hang":
        await asyncio.sleep(60)
    return 1.0

async def async_block(rollout, task):
    while rollout.text == "hang":
        pass
    return 1.0

async def async_exit(rollout, task):
    if rollout.text == "exit":
        raise SystemExit(3)
    return 1.0

def returns_awaitable(rollout, task):
    return slow_async(rollout, task)

def parent_of_sleeper(rollout, task):
    child = subprocess.Popen(["sleep", "60"])
    with open(task.info["out"], "w") as file:
        file.write(str(child.pid))
    time.sleep(60)

def forks(rollout, task):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(7)

def recurse():
    return recurse()

def overflow_stack():
    sys.setrecursionlimit(10**9)
    nested = []
    for _ in range(10**6):
        nested = [nested]
    return len(repr(nested))

def spin():
    while True:
        pass

def explode():
    return re.match(r"(a+)+$", "a" * 64 + "b")

def grow():
    kept = []
    while True:
        kept.append(bytearray(10**7))

def thread_exit():
    threading.Timer(0.05, os._exit, [9]).start()
    time.sleep(0.2)

def raise_value_error():
    raise ValueError("no number\\nin the text")

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def raise_unprintable():
    raise Unprintable

BEHAVIOURS = {f.__name__: f for f in [recurse, overflow_stack, spin, explode, grow, thread_exit, raise_value_error, raise_unprintable]}
BEHAVIOURS["sleep"] = lambda: time.sleep(60)
BEHAVIOURS["os_exit"] = lambda: os._exit(5)
BEHAVIOURS["sys_exit"] = lambda: sys.exit(5)
BEHAVIOURS["big_number"] = lambda: 9**9**9
BEHAVIOURS["big_list"] = lambda: len([0] * 10**11)
BEHAVIOURS["kill"] = lambda: os.kill(os.getpid(), 11)
BEHAVIOURS["ok"] = lambda: 1.0
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def rollout(text: str, n: int = 0, **info) -> Rollout:
    task = Task(id=f"task-{n}", prompt=({"role": "user", "content": "say \ud800 it"},), answer={"gold": [n, None]}, info=info)
    return Rollout(
        task=task, sample=n, tokens=(1, 2, 3), sampled=(False, True, True), logp_gen=(0.0, -0.1 - n, float("-inf")),
        turns=(Turn("prompt", 0, 1, "say it"), Turn("policy", 1, 3, text)), stop="end_token", version=7,
    )


def setting(file: Path, name: str, timeout_s: float = LIMIT_S, **more) -> Reward:
    return Reward(fn=Ref(f"{file}:{name}", more.pop("values", {})), timeout_s=timeout_s, **more)


def score(reward, *texts, **pool) -> list[tuple[float | None, str]]:
    """(reward, error) of each text."""
    with RewardPool([reward], **pool) as made:
        found = made.score([rollout(text, n) for n, text in enumerate(texts)])
    return [(s.reward, next(iter(s.errors.values()), "")) for s in found]


@pytest.mark.parametrize("isolate", [True, False])
def test_numbers_are_scores_and_everything_else_is_a_reason(file, isolate):
    texts = [
        "return 0.25", "return True", "return 3", "return Fraction(1, 4)", "return None", "return float('nan')", "return -float('inf')",
        "return 10**400", "return '1.0'", "return [1.0]", "raise_value_error", "raise_unprintable", "sys_exit", "recurse", "return -0.5",
    ]
    found = score(setting(file, "by_text", isolate=isolate), *texts)
    assert [reward for reward, _ in found] == [0.25, 1.0, 3.0, 0.25, *[None] * 10, -0.5]
    errors = dict(zip(texts, (error for _, error in found), strict=True))
    assert errors["return None"] == "returned None (could not be scored)"
    assert errors["return float('nan')"].startswith("ValueError: returned nan;")
    assert errors["return -float('inf')"].startswith("ValueError: returned -inf;")
    assert errors["return 10**400"].startswith("OverflowError: ")
    assert errors["return '1.0'"].startswith("TypeError: returned '1.0' of type str;")
    assert errors["return [1.0]"].startswith("TypeError: returned [1.0] of type list;")
    assert errors["raise_value_error"].startswith("ValueError: no number in the text (my_rewards.py:")
    assert errors["raise_unprintable"].startswith("Unprintable: (its message cannot be shown)")
    assert errors["sys_exit"].startswith("SystemExit: 5")
    assert errors["recurse"].startswith("RecursionError: ")
    assert errors["return -0.5"] == ""


@pytest.mark.parametrize("text", ["spin", "sleep", "explode", "big_number"])
def test_a_hang_costs_its_time_limit_and_its_rollout_only(file, text):
    began = time.monotonic()
    found = score(setting(file, "by_text"), "ok", text, "ok", text, "ok")
    assert [reward for reward, _ in found] == [1.0, None, 1.0, None, 1.0]
    assert found[1][1] == f"TimeoutError: no answer within {LIMIT_S:g} s; the call was stopped" == found[3][1]
    assert 2 * LIMIT_S < time.monotonic() - began < 2 * LIMIT_S + 5


@pytest.mark.parametrize(("text", "reason"), [
    ("os_exit", "exited with code 5"), ("kill", "SIGSEGV"), ("thread_exit", "exited with code 9"), ("overflow_stack", ""),
])
def test_a_crash_is_an_error_of_its_rollout_only(file, text, reason):
    found = score(setting(file, "by_text", timeout_s=10), "ok", text, "ok", text, *["ok"] * 20, workers=2)
    assert [reward for reward, _ in found] == [1.0, None, 1.0, None, *[1.0] * 20]
    assert reason in found[1][1]
    if reason:
        assert found[1][1].startswith("RuntimeError: the worker process died in this call: it ")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
@pytest.mark.parametrize("text", ["grow", "big_list"])
def test_a_memory_bomb_ends_at_the_limit(file, text):
    found = score(setting(file, "by_text", timeout_s=10), "ok", text, "ok", memory_gib=0.25)
    assert [reward for reward, _ in found] == [1.0, None, 1.0]
    assert found[1][1].startswith("MemoryError")


@pytest.mark.parametrize("isolate", [True, False])
def test_async_rewards(file, isolate):
    assert score(setting(file, "slow_async", isolate=isolate, timeout_s=5), "a", "b") == [(0.25, ""), (0.25, "")]
    assert score(setting(file, "returns_awaitable", isolate=isolate, timeout_s=5), "a") == [(0.25, "")]


@pytest.mark.parametrize(("name", "isolate"), [("async_hang", True), ("async_hang", False), ("async_block", True)])
def test_an_async_hang(file, name, isolate):
    found = score(setting(file, name, isolate=isolate), "a", "hang", "b")
    assert [reward for reward, _ in found] == [1.0, None, 1.0]
    assert found[1][1].startswith(f"TimeoutError: no answer within {LIMIT_S:g} s")


def test_an_async_exit(file):
    found = score(setting(file, "async_exit"), "a", "exit", "b")
    assert [reward for reward, _ in found] == [1.0, None, 1.0]
    assert found[1][1].startswith("SystemExit: 3")


def test_async_rewards_in_this_process_run_at_once(file):
    began = time.monotonic()
    assert score(setting(file, "slow_async", isolate=False, timeout_s=5), *"abcdefghij") == [(0.25, "")] * 10
    assert time.monotonic() - began < 1.5, "ten calls of 0.2 s, one after the other, would take 2 s"


def test_hung_calls_in_this_process_are_abandoned(file):
    with RewardPool([setting(file, "by_text", isolate=False, timeout_s=0.3)]) as pool:
        found = pool.score([rollout(text, n) for n, text in enumerate(["sleep", "ok", "sleep", "ok"])])
        assert [s.reward for s in found] == [None, 1.0, None, 1.0]
        assert "no answer within 0.3 s; the call was abandoned in its thread" in found[0].errors["by_text"]
        assert pool.score([rollout("ok")])[0].reward == 1.0


def test_a_blocked_event_loop_is_replaced(tmp_path):
    code = REWARDS.replace('while rollout.text == "hang":\n        pass', 'if rollout.text == "hang":\n        time.sleep(30)')
    (tmp_path / "blocking.py").write_text(code)
    with RewardPool([setting(tmp_path / "blocking.py", "async_block", isolate=False, timeout_s=0.3)]) as pool:
        assert pool.score([rollout("hang")])[0].errors["async_block"].startswith("TimeoutError")
        assert pool.score([rollout("a")])[0].reward == 1.0


@pytest.mark.parametrize("isolate", [True, False])
def test_answers_come_back_by_rollout_from_many_threads(file, isolate):
    rewards = [setting(file, "half", weight=2.0, isolate=isolate), setting(file, "one", weight=0.5, isolate=True)]
    found: dict[int, list] = {}
    with RewardPool(rewards, workers=2) as pool:
        def use(thread: int) -> None:
            rollouts = [rollout(f"n{thread * 1000 + n}", n) for n in range(50)]
            found[thread] = [(s.rollout is r, s.scores["half"], s.reward) for s, r in zip(pool.score(rollouts), rollouts, strict=True)]

        threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for thread in range(4):
        numbers = [thread * 1000 + n for n in range(50)]
        assert found[thread] == [(True, n / 2, n + 0.5) for n in numbers]


def test_the_same_scores_for_any_number_of_workers_and_calls(file):
    texts = [f"return {n} / 7" if n % 5 else "return None" for n in range(60)]
    once = score(setting(file, "by_text"), *texts)
    assert once == score(setting(file, "by_text"), *texts, workers=3)
    with RewardPool([setting(file, "by_text")]) as pool:
        one_by_one = [pool.score([rollout(text, n)])[0] for n, text in enumerate(texts)]
    assert [(s.reward, next(iter(s.errors.values()), "")) for s in one_by_one] == once


def test_one_failing_reward_leaves_the_reward_unknown_and_the_others_seen(file):
    with RewardPool([setting(file, "by_text"), setting(file, "one", weight=3.0)]) as pool:
        good, bad, empty = pool.score([rollout("ok"), rollout("os_exit", 1), rollout("return None", 2)])
    assert (good.reward, good.scores, good.errors) == (4.0, {"by_text": 1.0, "one": 1.0}, {})
    assert (bad.reward, bad.scores) == (None, {"by_text": None, "one": 1.0})
    assert set(bad.errors) == set(empty.errors) == {"by_text"}


def test_the_worker_sees_the_same_record(file, tmp_path):
    made = rollout("text \U0001f600 \udcff", 3, out=str(tmp_path / "seen"), nested={"list": [1, 2.5, None, True]})
    with RewardPool([setting(file, "whole_record")]) as pool:
        assert pool.score([made])[0].errors == {}
    assert (tmp_path / "seen").read_text() == repr(made)


def test_data_that_is_no_json_is_an_error_of_its_rollout(file):
    with RewardPool([setting(file, "one")]) as pool:
        bad, good = pool.score([rollout("a", 0, when={1, 2}), rollout("b", 1)])
    assert good.reward == 1.0 and bad.reward is None
    assert "answer and info must be plain JSON" in bad.errors["one"]


def test_a_big_rollout_travels(file):
    big = "x" * 3_000_000
    assert score(setting(file, "by_text", timeout_s=10), "return 1 #" + big, "ok", "sys_exit" + big)[:2] == [(1.0, ""), (1.0, "")]


def test_a_child_that_hangs_does_not_block_sending(file):
    found = score(setting(file, "by_text"), *["ok"] * 40, "spin", *["return 1 #" + "x" * 200_000] * 3)
    assert [reward for reward, _ in found] == [1.0] * 40 + [None] + [1.0] * 3


def test_what_the_child_started_is_killed_with_it(file, tmp_path):
    out = tmp_path / "pid"
    with RewardPool([setting(file, "parent_of_sleeper")]) as pool:
        assert pool.score([rollout("a", out=str(out))])[0].reward is None
    _wait_until_gone(int(out.read_text()))


def _wait_until_gone(pid: int) -> None:
    for _ in range(60):
        if not _is_running(pid):
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail(f"process {pid} is still running")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_process_that_holds_the_pipe_hides_no_crash(file):
    found = score(setting(file, "forks", timeout_s=20), "a")
    assert found[0][1] == "RuntimeError: the worker process died in this call: it exited with code 7"


def test_close_kills_the_workers_and_is_idempotent(file):
    pool = RewardPool([setting(file, "process_id")], workers=2)
    pid = int(pool.score([rollout("a")])[0].reward)
    assert _is_running(pid)
    pool.close()
    pool.close()
    assert not _is_running(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([rollout("a")])


def test_close_answers_the_calls_in_progress(file):
    pool = RewardPool([setting(file, "by_text", timeout_s=30)])
    found = []
    thread = threading.Thread(target=lambda: found.extend(pool.score([rollout("sleep"), rollout("ok", 1)])))
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(timeout=5)
    assert [s.reward for s in found] == [None, None]
    assert all("closed" in s.errors["by_text"] for s in found)


def test_prints_go_to_the_log_and_stdin_is_empty(file, tmp_path):
    with RewardPool([setting(file, "loud"), setting(file, "reads_stdin")], log=tmp_path / "log.txt") as pool:
        assert pool.score([rollout("a"), rollout("b", 1)])[1].scores == {"loud": 1.0, "reads_stdin": 0.0}
    log = (tmp_path / "log.txt").read_text()
    assert log.count("printed by the reward") == log.count("written to the file descriptor") == 2


@pytest.mark.parametrize("isolate", [True, False])
def test_values_arrive(file, isolate):
    values = {"by": 0.5, "table": {"a": [1, 2]}, "name": "y"}
    assert score(setting(file, "scaled", values=values, isolate=isolate), "abc") == [(1.5, "")]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(("name", "values", "message"), [
    ("haff", {}, "did you mean 'half'"),
    ("half", {"strikt": True}, r"takes no \['strikt'\]"),
    ("scaled", {}, r"needs \['by', 'table'\]"),
    ("add", {}, r"needs \['n', 'to'\]"),
    ("BEHAVIOURS", {}, "is a dict"),
    ("Unprintable", {}, "is a class"),
])
def test_a_reward_that_does_not_fit_is_refused_at_start(file, isolate, name, values, message):
    with pytest.raises(RefError, match=message):
        RewardPool([setting(file, name, values=values, isolate=isolate)])


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(("code", "message"), [
    ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    ("def score(rollout, task)\n", "SyntaxError"),
    ("1 / 0", "ZeroDivisionError"),
])
def test_a_file_that_does_not_import_is_refused_at_start(tmp_path, isolate, code, message):
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(RefError, match=message):
        RewardPool([setting(path, "score", isolate=isolate)])


@pytest.mark.parametrize(("code", "message"), [
    ("import os; os._exit(3)", "ended while it imported .*exited with code 3"),
    ("import sys; sys.exit(2)", "SystemExit: 2"),
    ("import time; time.sleep(60)", "took longer than 1 s"),
])
def test_an_import_that_ends_or_hangs_is_refused_at_start(tmp_path, code, message):
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(RefError, match=message):
        RewardPool([setting(path, "score")], workers=2, start_timeout_s=1.0)


def test_start_is_not_part_of_a_call(tmp_path):
    path = tmp_path / "slow_import.py"
    path.write_text("import time\ntime.sleep(0.6)\ndef score(rollout, task):\n    return 1.0\n")
    assert score(setting(path, "score", timeout_s=0.3), "a") == [(1.0, "")]


def test_a_file_that_breaks_during_the_run_is_an_error_and_recovers(tmp_path):
    path = tmp_path / "changing.py"
    good = "import os\ndef score(rollout, task):\n    return 1.0 if rollout.text == 'a' else os._exit(1)\n"
    path.write_text(good)
    with RewardPool([setting(path, "score")]) as pool:
        path.write_text("1 / 0")
        first, second = pool.score([rollout("exit"), rollout("a", 1)])
        assert "died in this call" in first.errors["score"]
        assert "could not be started again" in second.errors["score"]
        path.write_text(good)
        assert pool.score([rollout("a")])[0].reward == 1.0


def test_two_rewards_of_one_name_are_refused(file, tmp_path):
    (tmp_path / "other.py").write_text("def half(rollout, task):\n    return 1\n")
    with pytest.raises(RefError, match="two rewards are called 'half'"):
        RewardPool([setting(file, "half"), setting(tmp_path / "other.py", "half")])


def test_values_that_cannot_travel_are_refused_at_start(file):
    with pytest.raises(RefError, match="must be plain JSON"):
        RewardPool([setting(file, "scaled", values={"by": {1, 2}, "table": 0})])


def test_the_worker_imports_no_torch(tmp_path):
    path = tmp_path / "modules.py"
    path.write_text("import sys\ndef score(rollout, task):\n    return not {'torch', 'transformers', 'pydantic'} & sys.modules.keys()\n")
    assert score(setting(path, "score"), "a") == [(1.0, "")]


def test_cheap_rewards_are_scored_by_the_thousand(file):
    rollouts = [rollout(f"n{n}", n) for n in range(2000)]
    with RewardPool([setting(file, "half")]) as pool:
        pool.score(rollouts[:100])
        began = time.monotonic()
        found = pool.score(rollouts)
        took_s = time.monotonic() - began
    assert [s.reward for s in found] == [n / 2 for n in range(2000)]
    assert took_s < 2.0, f"{2000 / took_s:.0f} rollouts/s"


NO_GUARD = '''
import json, sys
from burnish.config import Reward
from burnish.ref import Ref
from burnish.rewards.pool import RewardPool
from burnish.types import Rollout, Task, Turn

LENGTH = len("four")

def score(rollout, task):
    return len(rollout.text) / LENGTH

rollouts = [Rollout(Task("t", "p"), n, (1,), (True,), (0.0,), (Turn("policy", 0, 1, "x" * n),), "end_token", 0) for n in range(3)]
with RewardPool([Reward(fn=Ref.of(score))], workers=2) as pool:
    print(json.dumps([s.reward for s in pool.score(rollouts)]))

def below(rollout, task):
    return 1.0
'''


def _run_script(path: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, path.name], cwd=path.parent, env=env, capture_output=True, text=True, timeout=60)


def test_a_script_without_main_guard(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(NO_GUARD)
    done = _run_script(path)
    assert (json.loads(done.stdout), done.stderr) == ([0.0, 0.25, 0.5], "")


def test_a_script_without_main_guard_whose_reward_stands_below(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(NO_GUARD.replace("Ref.of(score)", "Ref('train.py:below')"))
    done = _run_script(path)
    assert done.returncode == 1
    assert "the file starts training when it is imported, before below is defined" in done.stderr


def test_a_killed_parent_leaves_no_worker(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent('''
        import os
        from burnish.config import Reward
        from burnish.ref import Ref
        from burnish.rewards.pool import RewardPool
        from burnish.types import Rollout, Task, Turn

        def score(rollout, task):
            return os.getpid()

        if __name__ == "__main__":
            pool = RewardPool([Reward(fn=Ref.of(score))])
            made = Rollout(Task("t", "p"), 0, (1,), (True,), (0.0,), (), "end_token", 0)
            print(int(pool.score([made])[0].reward), flush=True)
            os.kill(os.getpid(), 9)
    '''))
    _wait_until_gone(int(_run_script(path).stdout))


@pytest.mark.slow
def test_a_worker_that_hangs_without_a_parent_ends_by_itself(tmp_path):
    """The call holds the interpreter's lock in C, so that nothing but the kernel's timer can end it."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent('''
        import os, re, threading
        from burnish.config import Reward
        from burnish.ref import Ref
        from burnish.rewards.pool import RewardPool
        from burnish.types import Rollout, Task

        def score(rollout, task):
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            re.match(r"(a+)+$", "a" * 64 + "b")

        if __name__ == "__main__":
            pool = RewardPool([Reward(fn=Ref.of(score), timeout_s=2.0)])
            threading.Timer(1.0, os.kill, [os.getpid(), 9]).start()
            pool.score([Rollout(Task("t", "p"), 0, (1,), (True,), (0.0,), (), "end_token", 0)])
    '''))
    done = _run_script(path)   # returns when the worker has let go of stderr: after its limit and the grace
    assert done.returncode == -9
    _wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_relative_file_and_a_module_by_name(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert score(Reward(fn=Ref("my_rewards.py:half")), "n3") == [(1.5, "")]
    monkeypatch.syspath_prepend(str(file.parent))
    assert score(Reward(fn=Ref("my_rewards:half")), "n3") == [(1.5, "")]


def test_a_long_run_of_cheap_calls_keeps_being_scored(file):
    """The time of a call that the pool keeps may not run down to nothing when answers arrive many at once."""
    with RewardPool([setting(file, "one")]) as pool:
        for _ in range(4):
            assert {s.reward for s in pool.score([rollout("x", n) for n in range(8000)])} == {1.0}


def test_an_error_of_the_pool_itself_answers_every_rollout(file, monkeypatch):
    """Whatever breaks inside: no rollout waits for ever, and none gets a number."""
    with RewardPool([setting(file, "one")]) as pool:
        monkeypatch.setattr("burnish.rewards.pool._Driver._step", lambda self: 1 / 0)
        scored = pool.score([rollout("x", n) for n in range(20)])
    assert all(s.reward is None and "ZeroDivisionError" in s.errors["one"] for s in scored)


def test_shares_of_one_add_up_to_one(file):
    rewards = [Reward(fn=Ref("exact"), weight=0.7), Reward(fn=Ref("positions"), weight=0.2), setting(file, "one", weight=0.1)]
    right = Rollout(Task("t", "p", "x"), 0, (1,), (True,), (-1.0,), (Turn("policy", 0, 1, "x"),), "end_token", 0)
    with RewardPool(rewards) as pool:
        assert pool.score([right])[0].reward == 1.0
