"""Metrics file, sinks, stored rollouts and the live view."""

import importlib.util
import io
import json
import math
import os
import pty
import select
import subprocess
import sys
import textwrap

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from burnish.monitor.live import Live, duration, sparkline
from burnish.monitor.rollouts import read_rollouts, read_rows, write_rollouts
from burnish.monitor.sinks import SinkError, mlflow, tensorboard, trackio, wandb
from burnish.monitor.writer import MetricsError, MetricsWriter, read_metrics
from burnish.types import Group, Rollout, Scored, Task, Turn

ROWS = [{"step": n, "train/lr": n / 3} for n in range(4)]


def write(run_dir, steps, **kwargs):
    with MetricsWriter(run_dir, **kwargs) as writer:
        for step in steps:
            writer.write(step, {k: v for k, v in ROWS[step].items() if k != "step"})


# ---- metrics.jsonl

def test_rows_come_back_exactly(tmp_path):
    write(tmp_path, range(4))
    assert read_metrics(tmp_path) == ROWS


def test_a_crash_at_any_byte_is_repaired_by_resume(tmp_path):
    """Whatever the crash left of the row of step 2, resuming after step 2 or 1 gives the file of the run that never crashed."""
    write(tmp_path / "whole", range(4))
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    rows_end = [len(b"".join(lines[: n + 1])) for n in range(4)]
    for cut in range(len(whole) + 1):
        complete = max((n for n in range(4) if cut >= rows_end[n] - 1), default=None)   # the newline may be missing
        run_dir = tmp_path / str(cut)
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_bytes(whole[:cut])
        assert read_metrics(run_dir) == ROWS[: 0 if complete is None else complete + 1]
        resume_step = -1 if complete is None else min(complete, 2)
        write(run_dir, range(resume_step + 1, 4), resume_step=resume_step)
        assert (run_dir / "metrics.jsonl").read_bytes() == whole, cut


def test_rows_beyond_the_resumed_step_are_cut(tmp_path):
    write(tmp_path, range(4))
    with MetricsWriter(tmp_path, resume_step=1) as writer:
        assert writer.last_step == 1
        writer.write(2, {"train/lr": 9.0})
    assert read_metrics(tmp_path) == [*ROWS[:2], {"step": 2, "train/lr": 9.0}]


def test_a_step_is_written_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"train/lr": 1.0})
        for step in (3, 2):
            with pytest.raises(MetricsError, match="step 3"):
                writer.write(step, {"train/lr": 1.0})
    assert read_metrics(tmp_path) == [{"step": 3, "train/lr": 1.0}]


def test_a_new_run_does_not_write_into_an_old_one(tmp_path):
    write(tmp_path, [0])
    with pytest.raises(MetricsError, match="resume that run, or choose another folder"):
        MetricsWriter(tmp_path)
    assert read_metrics(tmp_path) == ROWS[:1]


def test_a_file_broken_in_the_middle_is_named_by_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nsomething else\n{"step": 1}\n')
    with pytest.raises(MetricsError, match="line 2"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(("metrics", "words"), [({"reward": 1.0}, "stage/quantity_unit"), ({"train/loss": None}, "NoneType")])
def test_a_row_that_breaks_the_rules_is_refused(tmp_path, metrics, words):
    with MetricsWriter(tmp_path) as writer, pytest.raises(MetricsError, match=words):
        writer.write(1, metrics)
    assert read_metrics(tmp_path) == []


def test_a_full_disk_keeps_the_rows_before_it(tmp_path):
    """The file may not grow beyond 100 bytes: the row that does not fit is refused and leaves nothing of itself."""
    code = textwrap.dedent("""
        import resource, signal, sys
        from burnish.monitor.writer import MetricsWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        writer = MetricsWriter(sys.argv[1])
        for step in range(9):
            writer.write(step, {"train/lr": 0.5})
    """)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot write a row to" in ended.stderr and "the rows before it are kept" in ended.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]


# ---- sinks

class Broken:
    def start(self, run_dir, settings, resume_step=None):
        self.rows = 0

    def write(self, step, metrics):
        self.rows += 1
        raise ConnectionError("no route")

    def close(self):
        pass


def test_a_sink_that_fails_is_reported_once_and_the_run_goes_on(tmp_path):
    sink = Broken()
    with pytest.warns(UserWarning, match="sink Broken failed.*no route") as caught:
        write(tmp_path, range(4), sinks=[sink])
    assert len(caught) == sink.rows == 1
    assert read_metrics(tmp_path) == ROWS


def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(4), sinks=[tensorboard()], settings={"name": "x"})
    with MetricsWriter(tmp_path, [tensorboard()], 1) as writer:
        for step in (2, 3):
            writer.write(step, {"train/lr": 7.0 + step})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = [(e.step, e.value) for e in events.Scalars("train/lr")]
    assert values == [(0, 0.0), (1, pytest.approx(1 / 3)), (2, 9.0), (3, 10.0)]


@pytest.mark.parametrize(("sink", "library"), [(wandb, "wandb"), (mlflow, "mlflow"), (trackio, "trackio")])
def test_a_missing_library_says_what_to_install_before_anything_starts(sink, library):
    if importlib.util.find_spec(library):
        pytest.skip(f"{library} is installed here")
    with pytest.raises(SinkError, match=rf"pip install burnish\[{library}\]"):
        sink()


def test_the_monitor_does_not_import_torch(tmp_path):
    code = "import sys; from burnish.monitor import ledger, live, rollouts, sinks, writer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    write(tmp_path, range(3), sinks=[wandb(mode="offline")], settings={"name": "x"})
    first = json.loads((tmp_path / "sinks.json").read_text())
    write(tmp_path, range(2, 4), sinks=[wandb(mode="offline")], settings={"name": "x"}, resume_step=1)
    assert json.loads((tmp_path / "sinks.json").read_text()) == first
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_mlflow_goes_on_with_the_same_run(tmp_path):
    library = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    write(tmp_path, range(3), sinks=[mlflow(uri)], settings={"name": "x", "train": {"steps": 3}})
    write(tmp_path, range(2, 4), sinks=[mlflow(uri)], settings={"name": "x"}, resume_step=1)
    client = library.MlflowClient(uri)
    run = client.get_run(json.loads((tmp_path / "sinks.json").read_text())["mlflow"])
    assert run.data.params["train.steps"] == "3" and run.info.status == "FINISHED"
    assert run.data.metrics["train/lr"] == 1.0
    assert {m.step for m in client.get_metric_history(run.info.run_id, "train/lr")} == {0, 1, 2, 3}


# ---- rollouts

def rollouts():
    """Two groups: a conversation with an environment, an unscored rollout, and odd texts."""
    plain = Task("a/1", "1 + 1 =", answer={"sum": [2, 2.5]}, info={"level": 3})
    chat = Task("b", ({"role": "system", "content": "Be brief \u2028"}, {"role": "user", "content": "</script>"}), None)
    first = Rollout(
        plain, 0, (5, 6, 7), (False, True, True), (0.0, -0.1, -1 / 3),
        (Turn("prompt", 0, 1, "1 + 1 ="), Turn("policy", 1, 3, " 2\n")), "end_token", 3,
    )
    none = Rollout(plain, 1, (5,), (False,), (0.0,), (), "error:timeout", 3)
    talk = Rollout(
        chat, 0, (1, 2, 2**30, 4), (False, True, False, True), (0.0, -5e-324, 0.0, -745.1332191019412),
        (Turn("prompt", 0, 1, "p"), Turn("policy", 1, 2, "caf\u00e9"), Turn("env", 2, 3, "ok"), Turn("policy", 3, 4, "")), "env", 0,
    )
    return [
        Group(plain, (
            Scored(first, 1.0, {"exact": 1.0, "form": 0.1 + 0.2}),
            Scored(none, None, {"exact": None}, {"exact": "ValueError: no"}),
        )),
        Group(chat, (Scored(talk, -0.25, {}),)),
        Group(plain, (Scored(first, 0.0, {"exact": 0.0}),)),       # the same task again in one step stays a group of its own
    ]


def test_rollouts_come_back_equal(tmp_path):
    path = tmp_path / "rollouts" / "step-000007.parquet"
    write_rollouts(path, 7, rollouts(), lambda token: f"<{token}>", advantages=[[0.5, None], [1.5], [-1.0]])
    assert read_rollouts(path) == rollouts()
    rows = read_rows(path)
    assert [row["advantage"] for row in rows] == [0.5, None, 1.5, -1.0]
    assert rows[0]["token_texts"] == ["<5>", "<6>", "<7>"] and rows[0]["text"] == " 2\n" and rows[0]["step"] == 7
    assert rows[1]["errors"] == {"exact": "ValueError: no"} and rows[1]["scores"] == {"exact": None} and rows[1]["reward"] is None
    assert rows[2]["logp_gen"][1] == -5e-324


def test_a_step_without_rollouts_is_a_file_too(tmp_path):
    write_rollouts(tmp_path / "r.parquet", 1, [], str)
    assert read_rollouts(tmp_path / "r.parquet") == [] and "logp_gen" in pq.read_schema(tmp_path / "r.parquet").names


def test_a_file_is_there_complete_or_not_at_all(tmp_path):
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, 1, rollouts(), str)
    before = path.read_bytes()
    code = textwrap.dedent("""
        import os, sys
        os.replace = lambda *_: os._exit(9)     # killed after the bytes are written, before the file has its name
        sys.path[:0] = sys.argv[2:]
        from test_monitor import rollouts
        from burnish.monitor.rollouts import write_rollouts
        write_rollouts(sys.argv[1], 1, rollouts() * 5, str)
    """)
    assert subprocess.run([sys.executable, "-c", code, str(path), os.path.dirname(__file__)], timeout=60).returncode == 9
    assert path.read_bytes() == before
    write_rollouts(path, 1, rollouts() * 2, str)
    assert len(read_rollouts(path)) == 6 and os.listdir(tmp_path) == ["step-000001.parquet"]


def test_an_answer_that_is_not_json_names_the_task(tmp_path):
    task = Task("odd", "p", answer={1, 2})
    group = Group(task, (Scored(Rollout(task, 0, (1,), (True,), (0.0,), (), "end_token", 0), 1.0, {}),))
    with pytest.raises(ValueError, match="task odd: answer must be plain JSON"):
        write_rollouts(tmp_path / "r.parquet", 1, [group], str)


# ---- live view

def test_a_plain_line_a_step_away_from_a_terminal():
    out = io.StringIO()
    with Live(3, file=out) as live:
        live.status("generating", 1, 64)
        live.update(0, {"eval/accuracy_frac": 0.125})
        live.update(1, {"rollout/reward_mean": 0.5, "rollout/success_frac": 0.25, "time/step_s": 2.0, "rollout/not_scored_count": 2})
        live.update(2, {"rollout/reward_mean": math.nan, "rollout/not_scored_count": 0})
    first, second, third = out.getvalue().splitlines()
    assert first == "step 0/3  accuracy 12.5%"
    assert second.startswith("step 1/3  reward 0.500  success 25.0%  NOT SCORED 2  2.0 s")
    assert third.startswith("step 2/3  reward nan")
    assert "\x1b" not in out.getvalue()


def test_exceptions_pass_through():
    with pytest.raises(ZeroDivisionError), Live(3, file=io.StringIO(), terminal=True) as live:
        live.update(1, {"rollout/reward_mean": 1 / 0})


def run_on_a_terminal(code):
    """Output and exit status of a script that has a pseudo-terminal as its standard output."""
    leader, follower = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    script = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=env)
    os.close(follower)
    out = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            part = os.read(leader, 65536)
        except OSError:       # the other side is closed
            break
        if not part:
            break
        out += part
    os.close(leader)
    return out.decode(), script.wait(timeout=60)


def test_a_terminal_shows_the_run_and_is_restored_after_a_crash():
    out, status = run_on_a_terminal("""
        from burnish.monitor.live import Live
        with Live(10, name="demo") as live:
            live.update(0, {"eval/accuracy_frac": 0.1})
            for step in range(1, 8):
                live.status("generating", step, 64)
                live.update(step, {"rollout/reward_mean": step / 10, "rollout/not_scored_count": 1})
            print("printed by a reward")
            live.note("a note [with] brackets")
            raise RuntimeError("the true cause")
    """)
    assert status == 1
    for text in ("demo", "step 7/10", "generating 7/64", "reward", "0.700", "held-out accuracy", "10.0%", "not scored: 7", "left"):
        assert text in out, text
    assert "printed by a reward" in out and "a note [with] brackets" in out and "RuntimeError: the true cause" in out
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor must be visible again"


def test_sparkline_and_duration():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
    assert sparkline([1.0, 1.0]) == "\u2584\u2584" and sparkline([]) == "" and len(sparkline(range(1000))) == 24
    assert [duration(s) for s in (0.34, 45, 600, 7500)] == ["0.3 s", "45 s", "10 min", "2 h 05 min"]


def test_a_run_without_rollouts_shows_its_loss_and_what_it_is_judged_by():
    out = io.StringIO()
    with Live(4, file=out, terminal=False) as live:
        live.update(1, {"train/loss": 0.5, "train/preference_accuracy_frac": 0.75})
        live.update(2, {"train/loss": 0.25, "eval/preference_accuracy_frac": 0.9, "eval/loss": 0.3, "eval/preference_margin": 1.0})
        live.update(3, {"train/loss": 0.125, "eval/loss_nats": 2.0})
        live.update(4, {"train/loss": 0.1, "rollout/reward_mean": 0.6})
    lines = [line.partition("  left")[0] for line in out.getvalue().splitlines()]
    assert lines == [
        "step 1/4  loss 0.5000  in order 75.0%", "step 2/4  loss 0.2500  held-out preference accuracy 90.0%",
        "step 3/4  loss 0.1250  held-out loss 2.0000", "step 4/4  reward 0.600",
    ]


def test_the_live_table_draws_a_falling_loss(tmp_path):
    with Live(9, file=io.StringIO(), terminal=True) as live:
        for step in range(1, 9):
            live.update(step, {"train/loss": 1 / step, "eval/loss_nats": 3 / step})
        console = Console(width=120, file=io.StringIO())
        console.print(live._view())
    text = console.file.getvalue()
    assert "held-out loss, nats a token" in text and "loss" in text
    assert text.count("█") >= 2 and text.count("▼") == 2
