"""A whole run and what it leaves: T22 which tasks were visited, T23 each held-out item once, T17 the model, the ledger, the files."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
import torch
from tiny import METHODS, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish import Trainer
from burnish.api import RunError, session
from burnish.config.load import load_recipe
from burnish.models.load import load
from burnish.monitor.rollouts import read_rollouts
from burnish.monitor.writer import read_metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = tiny({
        "train.steps": 12, "train.prompts_per_step": 15, "algo.kl": {"coef": 0.0}, "monitor.sinks": ["tensorboard"],
        "evaluate.every_steps": 5, "sampling.stop": ["3"], "sampling.max_new_tokens": 3,
    })
    return settings, Trainer(settings, out=tmp_path_factory.mktemp("run") / "run").run()


def test_the_folder_holds_all_that_was_promised(run):
    settings, done = run
    assert {p.name for p in done.folder.iterdir()} >= {
        "settings.yaml", "run.json", "metrics.jsonl", "rollouts", "evals", "checkpoints", "tensorboard", "report.html",
        "summary.json", "model",
    }
    assert load_recipe(done.folder / "settings.yaml") == settings
    assert [f.name for f in sorted((done.folder / "rollouts").iterdir())] == [f"step-{n:06d}.parquet" for n in range(1, 13)]
    assert [f.name for f in sorted((done.folder / "evals").iterdir())] == [f"step-{n:06d}.parquet" for n in (0, 5, 10, 12)]
    facts = json.loads((done.folder / "run.json").read_text())
    assert facts["train_tasks"] == 90
    assert facts["end_tokens"]["sampling"] == {"<end>": 1}


def test_each_training_task_once_an_epoch_and_no_held_out_one(run):
    _, done = run
    visits = [g.task.id for f in sorted((done.folder / "rollouts").iterdir()) for g in read_rollouts(f)]
    held_out = {g.task.id for g in read_rollouts(done.folder / "evals" / "step-000000.parquet")}
    assert len(visits) == 180
    assert Counter(Counter(visits[:90]).values()) == {1: 90}
    assert Counter(Counter(visits[90:]).values()) == {1: 90}
    assert visits[:90] != visits[90:]
    assert not held_out & set(visits)


def test_a_task_that_comes_again_is_sampled_with_new_random_numbers(run):
    _, done = run
    samples = Counter(
        (s.rollout.task.id, s.rollout.sample) for f in (done.folder / "rollouts").iterdir() for g in read_rollouts(f) for s in g.scored
    )
    assert set(samples.values()) == {1}
    assert {n for _, n in samples} == set(range(8))


def test_each_held_out_item_once_in_each_evaluation(run):
    _, done = run
    files = sorted((done.folder / "evals").iterdir())
    ids = [[g.task.id for g in read_rollouts(f)] for f in files]
    assert all(i == ids[0] and len(set(i)) == 10 for i in ids)


def test_the_times_of_a_step_sum_to_it_and_metrics_agree_with_the_rollouts(run):
    _, done = run
    for row in read_metrics(done.folder):
        parts = [v for k, v in row.items() if k.startswith("time/") and k != "time/step_s"]
        assert sum(parts) == row["time/step_s"]
        if row["step"] == 0:
            continue
        groups = read_rollouts(done.folder / "rollouts" / f"step-{row['step']:06d}.parquet")
        scored = [s for g in groups for s in g.scored]
        assert row["rollout/reward_mean"] == pytest.approx(sum(s.reward for s in scored) / 60)
        assert row["rollout/sampled_tokens_mean"] == pytest.approx(sum(s.rollout.num_sampled for s in scored) / 60)
        taught = any(len({s.reward for s in g.scored}) > 1 for g in groups)
        assert row["train/tokens_count"] == (sum(s.rollout.num_sampled for s in scored) if taught else 0)
        assert abs(row.get("train/kl_cur_gen_nats", 0)) < 1e-9


def test_the_model_loads_in_plain_transformers_and_stops_where_training_stopped(run):
    settings, done = run
    model, tokenizer = AutoModelForCausalLM.from_pretrained(done.model), AutoTokenizer.from_pretrained(done.model)
    rollout = read_rollouts(done.folder / "evals" / "step-000012.parquet")[0].scored[0].rollout
    assert model.generation_config.eos_token_id == [1, tokenizer.convert_tokens_to_ids("3")]
    ids = torch.tensor([rollout.tokens[: rollout.turns[0].end]])
    with torch.no_grad():
        logits = model(ids).logits
    start = load(settings.model, seed=settings.seed).module
    with torch.no_grad():
        assert not torch.allclose(start(ids).logits, logits)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30)
    text = tokenizer.decode(out[0, ids.shape[1] :])
    assert "3" not in text[:-1]
    assert len(text) == 30 or text.endswith(("3", "<end>"))


def test_a_finished_model_is_a_start(run, tmp_path):
    """model.path is the one setting that the test of dead options leaves out."""
    _, done = run
    changes = {"model": {"path": str(done.model)}, "train.steps": 1}
    again = Trainer(tiny(changes), out=tmp_path / "again").run()
    other = Trainer(tiny({"train.steps": 1}), out=tmp_path / "other").run()
    assert read_metrics(again.folder) != read_metrics(other.folder)
    first = [read_rollouts(f / "evals" / "step-000000.parquet") for f in (again.folder, done.folder)]
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('the judge is away')", "ValueError: the judge is away"),
        ("return float('nan')", "nan"),
        ("return 'good'", "str"),
        ("return None", "could not be scored"),
        ("import time; time.sleep(9)", "no answer within 0.1 s"),
    ],
)
def test_a_reward_that_never_works_ends_the_run_with_its_reason(tmp_path, body, reason):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(rollout, task):\n    {body}\n")
    settings = tiny({
        "rewards": [{"fn": f"{file}:mine", "timeout_s": 0.1}], "tasks.held_out": 0, "train.prompts_per_step": 1,
        "train.samples_per_prompt": 2,
    })
    with pytest.raises(RunError, match=f"(?s)not one rollout of the last 3 steps could be scored.*{reason}"):
        Trainer(settings, out=tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run")
    assert [r["rollout/not_scored_count"] for r in rows] == [2, 2]
    assert all("rollout/reward_mean" not in r for r in rows)
    assert (tmp_path / "run" / "report.html").is_file()


def test_end_tokens_that_nothing_reads_need_not_be_there(tmp_path, monkeypatch):
    """Of a tokenizer without an end token: what a run names is enough, where only that is read."""
    ids = session.end_token_ids
    named = lambda tokenizer, names: pytest.fail("no end token") if names is None else ids(tokenizer, names)  # noqa: E731
    monkeypatch.setattr(session, "end_token_ids", named)
    done = Trainer(tiny({"sampling.end_tokens": ["7"], "tasks.held_out": 0, "train.steps": 1}), out=tmp_path / "a").run()
    assert list(json.loads((done.folder / "run.json").read_text())["end_tokens"]) == ["sampling"]
    done = Trainer(tiny({**METHODS["sft"], "evaluate.sampling.end_tokens": ["7"], "train.steps": 1}), out=tmp_path / "b").run()
    assert list(json.loads((done.folder / "run.json").read_text())["end_tokens"]) == ["evaluate.sampling"]


def test_a_reward_that_fails_at_times_is_left_out_and_counted(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(rollout, task):\n    if rollout.sample % 4 == 0: raise RuntimeError('busy')\n    return float(rollout.sample % 4)\n"
    )
    done = Trainer(tiny({"rewards": [{"fn": f"{file}:mine"}], "train.steps": 2, "tasks.held_out": 0}), out=tmp_path / "run").run()
    for row in read_metrics(done.folder):
        assert row["rollout/not_scored_count"] == 4
        assert row["rollout/reward_mean"] == 2.0
        assert row["train/rollouts_count"] == 12


def test_a_loss_that_is_not_finite_stops_the_run_and_names_a_checkpoint(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = 0\ndef mine(logp_cur, adv):\n    global calls\n    calls += 1\n"
        "    return logp_cur * adv * (1 if calls <= 4 else float('nan'))\n"
    )
    settings = tiny({"algo.loss": f"{file}:mine", "train.steps": 20, "train.tokens_per_micro_batch": 1000})
    with pytest.raises(RunError, match=r"(?s)the loss is not finite, now for 3 updates in a row.*step-00000\d.*--resume"):
        Trainer(settings, out=tmp_path / "run").run()
    assert [r["train/skipped_updates_count"] for r in read_metrics(tmp_path / "run")[1:]] == [0, 0, 0, 0, 1, 1]


def test_a_script_without_a_main_guard_holds_its_own_reward(tmp_path):
    import subprocess

    script = tmp_path / "train.py"
    script.write_text(
        "from burnish import Trainer\n\n\ndef mine(rollout, task):\n    return float(rollout.text == task.answer)\n\n\n"
        f"done = Trainer.from_recipe('from-scratch-tiny', out={str(tmp_path / 'run')!r}, steps=2, rewards=[{{'fn': mine}}]).run()\n"
        "print('accuracy', done.summary['after']['num_items'])\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert "accuracy 20" in done.stdout, done.stderr[-2000:]
