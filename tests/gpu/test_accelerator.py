"""The same parts on an accelerator: what the CPU gives, within float32's rounding there."""

from __future__ import annotations

import pytest
import torch
from parts import GRPO, engine_of, random_rows, state_of
from tiny import METHODS, WRITTEN, tiny

from burnish.api import Trainer
from burnish.config import Sampling
from burnish.engines import Request
from burnish.models.policy import Policy
from burnish.monitor.writer import read_metrics
from burnish.trainer import train_step
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")]
PLAIN = Sampling()


def test_log_probs_are_those_of_the_cpu(make_tiny):
    rows = random_rows(8)
    on_cpu = score_rows(Policy(make_tiny("llama").module), rows, sampling=PLAIN, tokens_per_micro_batch=100)
    state = state_of(make_tiny("llama"))
    assert state.policy.device.type == torch.accelerator.current_accelerator().type
    there = score_rows(state.policy, rows, sampling=PLAIN, tokens_per_micro_batch=100)
    for a, b in zip(on_cpu, there, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_the_engine_and_the_trainer_agree(make_tiny):
    loaded = make_tiny("llama")
    state = state_of(loaded)
    asked = [Request((5, 6, 7 + i), i, 20) for i in range(20)]
    for request, done in zip(asked, engine_of(loaded).generate(asked, Sampling(max_new_tokens=20)), strict=True):
        tokens = request.tokens + done.tokens
        row = Row(tokens, (False,) * 3 + (True,) * len(done.tokens))
        (logp,) = score_rows(state.policy, [row], sampling=PLAIN, tokens_per_micro_batch=100)
        assert logp[3:] == pytest.approx(done.logp_gen, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_the_weights(make_tiny, dtype):
    state = state_of(make_tiny("llama"), dtype=dtype)
    train_step(state, Batch(tuple(random_rows(8))), GRPO, sampling=PLAIN, lr_of=lambda u: 1e-3, clip_norm=1.0)
    assert state.version == 1


PAIRS = {**WRITTEN, "data.source": {"ref": "pairs_of_tasks", "tasks": {"ref": "copy_digits", "length": 2}}}
GAE = {"algo.advantage": {"ref": "gae", "gamma": 1.0, "lam": 0.95}, "algo.normalize": "whiten", "train.epochs": 2}
MORE = {
    "critic": {**GAE, "critic": {"lr": 1e-3}}, "value head": {**GAE, "critic": {"kind": "head"}},
    "preference": {**PAIRS, "loop": "preference", "preference": {"refresh_steps": 2}}, "reward model": {**PAIRS, "loop": "reward_model"},
    "coupled": {**PAIRS, "loop": "preference", "preference": {"losses": [{"fn": {"ref": "aot", "beta": 0.1}}]}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [*METHODS, *MORE])
def test_every_method_runs(tmp_path, method, dtype):
    changes = {**(METHODS | MORE)[method], "train.steps": 3, "model.dtype": dtype, "train.tokens_per_micro_batch": 40}
    rows = read_metrics(Trainer(tiny(changes), out=tmp_path / "run").run().folder)
    assert len(rows) == 4 and all("not_finite" not in row for row in rows)


def test_a_whole_run(tmp_path):
    done = Trainer(tiny({"model.dtype": "bfloat16", "algo.kl": {"coef": 0.01}}), out=tmp_path / "run").run()
    assert len(read_metrics(done.folder)) == 7
