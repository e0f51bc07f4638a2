"""Runs that learn: a small one each time, the shipped recipes by their own command."""

from __future__ import annotations

import json
import time

import pytest
from tiny import tiny

from burnish.api import Trainer
from burnish.monitor.writer import read_metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", [{"ref": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}, "reinforce", "importance_sampling"])
def test_a_reward_rises(tmp_path, loss, dtype):
    """One digit copied: the best policy earns 1, a random one 0.1."""
    settings = tiny({
        "tasks.source": {"ref": "copy_digits", "length": 1}, "tasks.held_out": 0, "sampling.max_new_tokens": 1, "algo.loss": loss,
        "train.steps": 60, "train.prompts_per_step": 10, "train.samples_per_prompt": 16, "optim.lr": 1e-2, "model.dtype": dtype,
        "checkpoint.every_steps": 60,
    })
    Trainer(settings, out=tmp_path / "run").run()
    rewards = [r["rollout/reward_mean"] for r in read_metrics(tmp_path / "run")]
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.7


def test_lora_learns_and_leaves_a_plain_model(tmp_path):
    """One answer to one prompt: what low-rank changes to random layers can learn."""
    settings = tiny({
        "tasks.source": {"ref": "copy_digits", "length": 1, "alphabet": "7"}, "tasks.held_out": 0, "sampling.max_new_tokens": 1,
        "model.lora": {"rank": 8}, "algo.kl": {"coef": 0.001}, "train.steps": 40, "train.prompts_per_step": 1,
        "train.samples_per_prompt": 64,
        "optim.lr": 1e-2, "checkpoint.every_steps": 40, "model.scratch.config.initializer_range": 0.2,
    })
    done = Trainer(settings, out=tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["rollout/reward_mean"] > rows[0]["rollout/reward_mean"] + 0.2
    assert rows[0]["train/kl_cur_ref_nats"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["train/kl_cur_ref_nats"] > 0.01
    assert "lora" not in (done.model / "config.json").read_text()


@pytest.mark.slow
def test_from_scratch_tiny_reaches_nine_in_ten(tmp_path):
    began = time.monotonic()
    done = Trainer.from_recipe("from-scratch-tiny", out=tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run")
    assert rows[1]["rollout/reward_mean"] < 0.2
    assert sum(r["rollout/reward_mean"] for r in rows[-5:]) / 5 > 0.9
    print(f"{time.monotonic() - began:.0f} s")
    assert done.summary["before"]["accuracy_frac"] < 0.1
    assert done.summary["after"]["accuracy_frac"] >= 0.8          # what the recipe says it reaches


@pytest.mark.slow
def test_a_real_model_gets_better_at_arithmetic(tmp_path):
    """The main job in short: a few steps of the demo's recipe on the real model, and the finished model in plain transformers."""
    pytest.importorskip("reasoning_gym")
    done = Trainer.from_recipe("arithmetic-grpo", out=tmp_path / "run", steps=12).run()
    rows = read_metrics(tmp_path / "run")
    first, last = (sum(r["rollout/reward_mean"] for r in part) / 3 for part in (rows[1:4], rows[-3:]))
    assert last > first + 0.1
    assert all(abs(r["train/kl_cur_gen_nats"]) < 0.02 for r in rows[1:] if "train/kl_cur_gen_nats" in r)
    assert json.loads((done.folder / "summary.json").read_text())["after"]["num_items"] > 50
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(done.model)
    model = AutoModelForCausalLM.from_pretrained(done.model)
    example = done.summary["examples"][0]
    ids = tokenizer(example["prompt"], return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=50)
    text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert text.endswith("\n")
    assert len(text) < 20
