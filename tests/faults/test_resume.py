"""T12: killed at any moment and resumed, a run ends with the same bits; a whole checkpoint is always there."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import METHODS, tiny, whole_and_resumed

from burnish import checkpoint
from burnish.api import RunError, Trainer
from burnish.checkpoint import CheckpointError
from burnish.config.load import dump
from burnish.monitor.rollouts import read_rollouts
from burnish.monitor.writer import read_metrics

CHANGES = {
    "train.epochs": 2, "train.minibatches": 2, "train.steps": 8,
    "algo.kl": {"coef": 0.05, "place": "loss", "target_nats": 0.1, "horizon_rollouts": 50},
}
TIMES = ("time/", "rate/", "memory/")


def run(folder: Path, changes=CHANGES, *, resume=False):
    settings = tiny(changes)
    return Trainer(settings, **({"resume": folder} if resume else {"out": folder})).run()


def facts(folder: Path) -> dict:
    """What must be the same: final weights and Adam's state, every metric that is not a time, every rollout."""
    last = checkpoint.newest(folder / "checkpoints").folder
    return {
        "sums": json.loads((last / "checksums.json").read_text()),
        "model": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "metrics": [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(folder)],
        "rollouts": {f"{f.parent.name}/{f.name}": read_rollouts(f) for f in sorted(folder.glob("*/step-*.parquet"))},
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return facts(folder)


# Where a process kills itself, by the function that it is about to call for the n-th time
MOMENTS = {
    "before the first step": ("burnish.loops.sync:sync", 1),
    "while generating": ("burnish.engines.native.engine:Stream.advance", 7),
    "while scoring": ("burnish.rewards.pool:RewardPool.score", 6),
    "between backward passes": ("burnish.trainer.precision:Weights.collect_grads", 13),
    "before the optimizer steps": ("burnish.trainer.step:_apply", 18),
    "before the metrics row": ("burnish.monitor.writer:MetricsWriter.write", 7),
    "before a checkpoint": ("burnish.checkpoint.folder:write", 3),
    "inside a checkpoint": ("burnish.checkpoint.folder:_sha256", 8),
    "before a checkpoint is in place": ("os:rename", 2),
    "before the last evaluation": ("burnish.evaluate.run:evaluate", 4),
    "before the model is exported": ("burnish.models.export:export", 1),
    "before the summary": ("burnish.monitor.report:write_report", 1),
}

KILLER = """
import importlib, os, signal, sys
place, count, folder, settings = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
import torch; torch.set_num_threads(1)
import burnish.api
from burnish.config.load import load_recipe
module, _, names = place.partition(":")
owner = importlib.import_module(module)
*path, last = names.split(".")
for name in path: owner = getattr(owner, name)
true, calls = getattr(owner, last), 0
def killing(*a, **k):
    global calls
    calls += 1
    if calls == count: os.kill(os.getpid(), signal.SIGKILL)
    return true(*a, **k)
setattr(owner, last, killing)
for module in list(sys.modules.values()):
    if module.__name__.startswith("burnish"):
        for name in [name for name, value in vars(module).items() if value is true]: setattr(module, name, killing)
burnish.api.Trainer(load_recipe(settings), out=folder).run()
"""


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_is_the_same_to_the_last_bit(tmp_path, uninterrupted, moment):
    place, count = MOMENTS[moment]
    recipe, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(dump(tiny(CHANGES)))
    done = subprocess.run(
        [sys.executable, "-c", KILLER, place, str(count), str(folder), str(recipe)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    if (last := checkpoint.newest(folder / "checkpoints")) is not None:
        checkpoint.read(last.folder)
    run(folder, resume=True)
    assert facts(folder) == uninterrupted
    assert [c.step for c in checkpoint.folder.all_of(folder / "checkpoints")] == [6, 8]
    assert not list((folder / "checkpoints").glob(".writing-*"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_to_the_same_bits(tmp_path, method):
    changes = {**METHODS[method], "train.steps": 5, "checkpoint.every_steps": 2, "evaluate.every_steps": 2}
    whole, resumed = whole_and_resumed(tmp_path, changes, stop_in_step=4)
    assert whole == resumed


def test_killed_from_outside_twice(tmp_path, uninterrupted):
    recipe, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(dump(tiny(CHANGES)))
    args = [sys.executable, "-m", "burnish", "train", str(recipe), "--out", str(folder)]
    for wanted in (2, 4):
        process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            last = checkpoint.newest(folder / "checkpoints")
            if last and last.step >= wanted:
                break
            time.sleep(0.002)
        process.kill()
        process.wait()
        args = [sys.executable, "-m", "burnish", "train", "--resume", str(folder)]
    run(folder, resume=True)
    assert facts(folder) == uninterrupted


def test_a_finished_run_goes_on_with_more_steps_and_a_new_rate(tmp_path):
    folder = tmp_path / "run"
    run(folder, {"train.steps": 4})
    Trainer(tiny({"train.steps": 6, "optim.lr": 7e-3, "optim.schedule": "constant"}), resume=folder).run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(7))
    assert [r["train/lr"] for r in rows[5:]] == [7e-3, 7e-3]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("name", ["weights.safetensors", "adam.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, name, how):
    folder = tmp_path / "run"
    run(folder, {"train.steps": 4})
    file = folder / "checkpoints" / "step-000004" / name
    data = bytearray(file.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "truncate":
        file.write_bytes(data[:-7])
    else:
        file.unlink()
    with pytest.raises(RunError, match=f"(?s)step-000004.*{name}.*step-000002"):
        run(folder, {"train.steps": 6}, resume=True)


def test_a_full_disk_ends_the_run_with_the_last_good_checkpoint(tmp_path):
    """RLIMIT_FSIZE makes every write beyond a size fail, as a full disk does."""
    recipe, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(dump(tiny(CHANGES)))
    limit = (
        "import resource, signal, sys, burnish.checkpoint.folder as f; true, calls = f.write, 0\n"
        "def full(*a, **k):\n"
        "    global calls; calls += 1\n"
        "    if calls == 3: signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "    return true(*a, **k)\n"
        "f.write = full; import burnish.checkpoint as c; c.write = full\n"
        "from burnish.cli import app; sys.argv = ['burnish', 'train', *sys.argv[1:]]; app()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limit, str(recipe), "--out", str(folder)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    for part in ("step-000006", "last good one is", "step-000004", "--resume"):
        assert part in done.stderr, done.stderr
    checkpoint.read(folder / "checkpoints" / "step-000004")
    assert not list((folder / "checkpoints").glob(".writing-*"))


def test_a_folder_that_cannot_be_written_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*choose another folder"):
        run(tmp_path / "file" / "run")


def test_a_run_is_not_overwritten_and_nothing_is_resumed_from_nowhere(tmp_path):
    run(tmp_path / "run", {"train.steps": 1})
    with pytest.raises(ValueError, match=r"already holds a run.*--resume"):
        run(tmp_path / "run")
    with pytest.raises(ValueError, match="holds no run to resume"):
        run(tmp_path / "none", resume=True)


def test_writing_over_an_old_checkpoint_keeps_a_whole_one_on_failure(tmp_path):
    import torch

    checkpoint.write(tmp_path, 2, tensors={"weights": {"a": torch.ones(3)}}, state={"x": 1})
    with pytest.raises(CheckpointError, match="last good one is"):
        checkpoint.write(tmp_path, 4, tensors={"weights": {"a": torch.ones(3)}}, state={"x": object()})
    tensors, state = checkpoint.read(checkpoint.newest(tmp_path).folder)
    assert (tensors["weights"]["a"].tolist(), state) == ([1, 1, 1], {"x": 1})


GROWING = """
import os
from burnish.data.sources import copy_digits
def tasks():
    return copy_digits(length=2)[: int(os.environ["NUM_TASKS"])]
"""


def test_a_resumed_run_notices_that_its_tasks_are_others(tmp_path, monkeypatch):
    (tmp_path / "growing.py").write_text(GROWING)
    changes = {"tasks.source": f"{tmp_path / 'growing.py'}:tasks", "train.steps": 4}
    monkeypatch.setenv("NUM_TASKS", "60")
    run(tmp_path / "run", changes)
    monkeypatch.setenv("NUM_TASKS", "90")
    with pytest.raises(ValueError, match=r"the data is not what .* was trained on"):
        run(tmp_path / "run", {**changes, "train.steps": 6}, resume=True)
    monkeypatch.setenv("NUM_TASKS", "60")
    run(tmp_path / "run", {**changes, "train.steps": 6}, resume=True)


def test_a_folder_belongs_to_one_process(tmp_path):
    from burnish.checkpoint.claim import hold

    run(tmp_path / "run", {"train.steps": 2})
    with hold(tmp_path / "run"), pytest.raises(ValueError, match="another process is working on the run"):
        run(tmp_path / "run", {"train.steps": 4}, resume=True)
    run(tmp_path / "run", {"train.steps": 4}, resume=True)


def test_steps_without_rewards_are_not_saved_over_good_ones(tmp_path):
    (tmp_path / "fails.py").write_text("def fails(rollout, task): return 1.0 if rollout.version < 2 else None\n")
    changes = {
        "rewards": [{"fn": "positions", "isolate": False}, {"fn": f"{tmp_path / 'fails.py'}:fails"}], "checkpoint.every_steps": 1,
        "tasks.held_out": 0, "train.steps": 20, "sampling.temperature": 1.5,
    }
    with pytest.raises(RunError, match="last 3 steps"):
        run(tmp_path / "run", changes)
    assert read_metrics(tmp_path / "run")[-1]["step"] == checkpoint.newest(tmp_path / "run" / "checkpoints").step + 2


def test_metrics_without_a_checkpoint_are_not_thrown_away(tmp_path):
    import shutil

    run(tmp_path / "run", {"train.steps": 5})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="has metrics up to step 5 but no whole checkpoint"):
        run(tmp_path / "run", {"train.steps": 6}, resume=True)
    assert len(read_metrics(tmp_path / "run")) == 6


def test_a_lost_evaluation_is_made_again_or_done_without(tmp_path):
    done = run(tmp_path / "run", {"train.steps": 4})
    (done.folder / "evals" / "step-000004.parquet").unlink()
    assert run(tmp_path / "run", {"train.steps": 4}, resume=True).summary["after"] == done.summary["after"]
    (done.folder / "evals" / "step-000000.parquet").unlink()
    assert "after" not in run(tmp_path / "run", {"train.steps": 4}, resume=True).summary
