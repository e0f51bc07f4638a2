"""Runs on written answers, on the best samples and from teachers: they learn, resume to the same bits, and count what they take."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import METHODS, TEACHERS, WRITTEN, facts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.api import Trainer
from burnish.api.distillation import is_on_policy
from burnish.api.session import Session
from burnish.chat.template import encode_answer
from burnish.monitor.rollouts import read_rollouts
from burnish.monitor.writer import read_metrics
from burnish.plan.preflight import examine

COPY = {"source": {"ref": "of_tasks", "tasks": {"ref": "copy_digits", "length": 1}}, "held_out": 0}
LEARN = {**WRITTEN, "data": COPY, "train.examples_per_step": 10, "train.steps": 40, "optim.lr": 1e-2, "checkpoint.every_steps": 40}
ASKED = {
    "tasks": {"source": {"ref": "copy_digits", "length": 2}, "held_out": 10}, "rewards": [{"fn": "exact", "isolate": False}],
    "data": {**WRITTEN["data"], "held_out": 10}, "train.examples_per_step": 32, "optim.lr": 1e-2, "evaluate.sampling.max_new_tokens": 3,
}
SHIPPED = {"teachers": [{"model": {"path": "package:burnish/models/shipped/copy-digits"}}]}
THREE = {
    **WRITTEN, "data": {"source": {"ref": "of_tasks", "tasks": {"ref": "copy_digits", "length": 3}}, "held_out": 50},
    "train.examples_per_step": 32, "train.steps": 50, "optim.lr": 1e-2, "checkpoint.every_steps": 50, "evaluate": {},
}


def run(folder, changes):
    done = Trainer(tiny(changes), out=folder).run()
    return done, read_metrics(folder)


# they learn

@pytest.mark.parametrize("changes", [
    {"loop": "sft"}, {"loop": "sft", "model.dtype": "bfloat16"}, {"loop": "sft", "sft": {"reduce": "rollout_mean"}},
    {"loop": "sft", "train.epochs": 2, "train.minibatches": 2, "train.steps": 20, "train.tokens_per_micro_batch": 12},
], ids=["sft", "bfloat16", "rollout mean", "minibatches"])
def test_written_answers_are_learned(tmp_path, changes):
    _, rows = run(tmp_path / "run", LEARN | changes)
    assert rows[0]["train/nll_nats"] > 2.3
    assert rows[-1]["train/nll_nats"] < 0.5


def test_dft_learns_what_is_not_improbable(tmp_path):
    _, rows = run(tmp_path / "run", LEARN | {"loop": "sft", "sft": {"loss": "dft"}, "train.steps": 80})
    assert rows[0]["train/loss"] == pytest.approx(rows[0]["train/nll_nats"] / 13, rel=0.1)         # at first all are equally probable
    assert rows[-1]["train/nll_nats"] < 1.0


def test_the_best_of_many_samples_are_learned(tmp_path):
    changes = {
        "algo": None, "sft": {"best_of": 1, "min_reward": 1.0}, "tasks": {"source": {"ref": "copy_digits", "length": 1}, "held_out": 0},
        "sampling.max_new_tokens": 1, "train.prompts_per_step": 10, "train.samples_per_prompt": 16, "train.steps": 50, "optim.lr": 1e-2,
        "checkpoint.every_steps": 50,
    }
    _, rows = run(tmp_path / "run", changes)
    assert rows[0]["rollout/reward_mean"] < 0.25
    assert sum(r["rollout/reward_mean"] for r in rows[-5:]) / 5 > 0.8


@pytest.mark.parametrize("changes", [
    {"distill": {**SHIPPED, "divergence": "forward_kl"}},
    {"distill": {**SHIPPED, "on_policy_frac": 1.0}, "sampling": {"max_new_tokens": 4}},
    {"distill": {**SHIPPED, "on_policy_frac": 0.5}, "sampling": {"max_new_tokens": 4}, "model.dtype": "bfloat16"},
], ids=["written", "the policy's own", "both in bfloat16"])
def test_a_teachers_distributions_are_learned(tmp_path, changes):
    _, rows = run(tmp_path / "run", {**THREE, "loop": "distill", **changes})
    assert rows[0]["eval/divergence_nats"] > 0.4
    assert rows[-1]["eval/divergence_nats"] < 0.7 * rows[0]["eval/divergence_nats"]


def test_exact_on_policy_distillation_in_loop_sync(tmp_path):
    changes = {
        "algo": None, "distill": SHIPPED, "tasks": {"source": {"ref": "copy_digits", "length": 3}, "held_out": 0},
        "sampling.max_new_tokens": 4, "train.steps": 50, "train.prompts_per_step": 16, "train.samples_per_prompt": 2, "optim.lr": 1e-2,
        "checkpoint.every_steps": 50,
    }
    _, rows = run(tmp_path / "run", changes)
    assert sum(r["train/divergence_nats"] for r in rows[-5:]) / 5 < 0.7 * rows[0]["train/divergence_nats"]


def test_a_model_that_was_fine_tuned_teaches_another(tmp_path):
    few = {"evaluate": {"sampling": {"max_new_tokens": 3}}}
    first, rows = run(tmp_path / "teacher", {**WRITTEN, **ASKED, **few, "loop": "sft", "train.steps": 100})
    assert rows[-1]["eval/accuracy_frac"] > rows[0]["eval/accuracy_frac"] + 0.4
    changes = {
        **WRITTEN, **ASKED, **few, "loop": "distill", "seed": 1, "train.steps": 80,
        "distill": {"teachers": [{"model": {"path": str(first.model)}}], "divergence": "forward_kl"},
    }
    _, rows = run(tmp_path / "student", changes)
    assert rows[-1]["eval/divergence_nats"] < 0.3 * rows[0]["eval/divergence_nats"]
    assert rows[-1]["eval/accuracy_frac"] > rows[0]["eval/accuracy_frac"] + 0.3


# what is measured

def test_tokens_and_rates_are_those_that_went_through(tmp_path):
    changes = {**WRITTEN, "loop": "sft", "train.epochs": 2, "train.steps": 3, "evaluate": {}}
    _, rows = run(tmp_path / "run", changes)
    for row in rows[1:]:
        assert (row["train/rollouts_count"], row["train/tokens_count"], row["train/too_long_count"]) == (8, 8 * 3, 0)   # two digits, end
        assert row["rate/train_tokens_per_s"] * row["time/train_s"] == pytest.approx(2 * 8 * 6)                         # "12>" before them
        assert "rate/generate_tokens_per_s" not in row


def test_held_out_loss_is_that_of_the_finished_model_in_plain_transformers(tmp_path):
    settings = {**WRITTEN, "loop": "sft"}
    done, rows = run(tmp_path / "run", settings)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(done.model), AutoTokenizer.from_pretrained(done.model)
    total = count = 0
    for example in examine(tiny(settings)).answers.held_out:
        tokens, mask = encode_answer(tokenizer, example.prompt, example.answer, end=tokenizer.eos_token_id)
        labels = torch.tensor([[t if m else -100 for t, m in zip(tokens, mask, strict=True)]])
        with torch.no_grad():
            total += model(torch.tensor([tokens]), labels=labels).loss.item() * sum(mask)
        count += sum(mask)
    assert rows[-1]["eval/loss_nats"] == pytest.approx(total / count, rel=1e-4)
    assert json.loads((done.folder / "summary.json").read_text())["measured"]["eval/loss_nats"]["after"] == rows[-1]["eval/loss_nats"]


def test_the_best_samples_are_the_ones_in_the_rollouts(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(rollout, task): return None if rollout.sample % 5 == 4 else float(rollout.sample * 7 % 5)\n")
    changes = {
        "algo": None, "sft": {"best_of": 2, "min_reward": 2.0}, "rewards": [{"fn": f"{file}:mine", "isolate": False}], "train.steps": 2,
        "train.samples_per_prompt": 10, "tasks.held_out": 0,
    }
    _, rows = run(tmp_path / "run", changes)
    for row in rows:
        groups = read_rollouts(tmp_path / "run" / "rollouts" / f"step-{row['step']:06d}.parquet")
        learned = []
        for group in groups:
            good = sorted((s for s in group.scored if s.reward is not None and s.reward >= 2), key=lambda s: (-s.reward, s.rollout.sample))
            learned += good[:2]
        assert {s.reward for s in learned} == {4.0}
        assert row["train/rollouts_count"] == len(learned) == 8
        assert row["train/tokens_count"] == sum(s.rollout.num_sampled for s in learned)
        assert row["rollout/not_scored_count"] == 8
        assert row["rollout/dropped_rollouts_count"] == 40 - 8


def test_where_no_sample_is_good_enough_nothing_is_learned(tmp_path):
    changes = {"algo": None, "sft": {"best_of": 1, "min_reward": 2.0}, "train.steps": 2, "evaluate": {}}
    done, rows = run(tmp_path / "run", changes)
    assert [(r["train/rollouts_count"], r["train/tokens_count"]) for r in rows[1:]] == [(0, 0)] * 2
    untouched = Trainer(tiny(changes | {"optim.lr": 0.0}), out=tmp_path / "still").run()
    assert (done.model / "model.safetensors").read_bytes() == (untouched.model / "model.safetensors").read_bytes()


OWN = {**METHODS["distill"], "train.steps": 16, "train.examples_per_step": 50, "evaluate": {}, "checkpoint.every_steps": 5}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    return run(folder, OWN)


def test_the_policys_own_steps_are_those_of_the_hash_and_no_random_number_is_used_twice(own):
    done, rows = own
    steps = [step for step in range(1, 17) if is_on_policy(step, 0.5, seed=0)]
    assert 3 < len(steps) < 13
    assert [int(f.stem[5:]) for f in sorted((done.folder / "rollouts").iterdir())] == steps
    seen = []
    for row in rows[1:]:
        assert row["train/on_policy_frac"] == float(row["step"] in steps)
        if row["step"] in steps:
            groups = read_rollouts(done.folder / "rollouts" / f"step-{row['step']:06d}.parquet")
            rollouts = [s.rollout for g in groups for s in g.scored]
            assert {r.version for r in rollouts} == {row["step"] - 1}           # by the weights that are then trained
            assert row["train/tokens_count"] == sum(r.num_sampled for r in rollouts)
            assert row["rate/generate_tokens_per_s"] * row["time/generate_s"] == pytest.approx(row["train/tokens_count"])
            assert row["rate/train_tokens_per_s"] * row["time/train_s"] == pytest.approx(sum(len(r.tokens) for r in rollouts))
            seen += [(r.task.id, r.sample) for r in rollouts]
        else:
            assert row["train/tokens_count"] == 50 * 3
            assert "time/generate_s" not in row
    assert len(set(seen)) == len(seen) == 50 * len(steps)
    assert len({n for _, n in seen}) > 3                                         # of tasks that came again


@pytest.mark.parametrize("stop_in_step", [7, 13])
def test_resumed_with_steps_of_both_kinds_is_the_same_to_the_last_bit(own, tmp_path, stop_in_step, monkeypatch):
    end_step = Session.end_step

    def breaking(session, step, *rest):
        if step == stop_in_step:
            raise KeyboardInterrupt
        end_step(session, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "end_step", breaking)
        Trainer(tiny(OWN), out=tmp_path / "run").run()
    Trainer(tiny(OWN), resume=tmp_path / "run").run()
    done, _ = own
    assert facts(tmp_path / "run") == facts(done.folder)
    names = [f.name for f in sorted((done.folder / "rollouts").iterdir())]
    assert [f.name for f in sorted((tmp_path / "run" / "rollouts").iterdir())] == names
    assert all(read_rollouts(tmp_path / "run" / "rollouts" / n) == read_rollouts(done.folder / "rollouts" / n) for n in names)


def test_a_teacher_computes_in_its_own_dtype(tmp_path, monkeypatch):
    seen = []
    from burnish.api import distillation

    real = distillation.teachers_of
    monkeypatch.setattr(distillation, "teachers_of", lambda session: seen.append(real(session)) or seen[-1])
    teachers = [{"model": TEACHERS["teachers"][0]["model"] | {"dtype": dtype}, "weight": weight} for dtype, weight in (
        ("float32", 3.0), ("bfloat16", 1.0))]
    _, rows = run(tmp_path / "run", {**METHODS["distill"], "distill": {"teachers": teachers}, "train.steps": 1})
    dtypes = [{p.dtype for p in policy.module.parameters()} for policy in seen[0].policies]
    assert dtypes == [{torch.float32}, {torch.bfloat16}]
    assert not any(p.requires_grad for policy in seen[0].policies for p in policy.module.parameters())
    assert rows[-1]["train/divergence_nats"] > 0
