"""T13: every setting, changed, changes something that can be seen, or is refused. A setting without an entry here fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tiny import tiny

from burnish.api import RunError, Trainer
from burnish.config import Settings
from burnish.engines.native import NativeEngine
from burnish.monitor.rollouts import read_rollouts
from burnish.monitor.writer import read_metrics

PARTS = """
import os, time
def slow(rollout, task):
    time.sleep(0.2)
    return 1.0
def in_which_process(rollout, task):
    return float(os.getpid() == int(os.environ["TRAINER_PID"]))
def nan(logp_cur, adv):
    return logp_cur * adv * float("nan")
class loud:
    def start(self, task): return task.prompt
    async def step(self, text):
        from burnish.envs import Reply
        return Reply("0>", done=True)
"""
LORA = {"model.lora": {"rank": 4, "dropout": 0.1}}
KL_LOSS = {"algo.kl": {"coef": 0.5, "place": "loss"}, "optim.lr": 1e-2}
ADAPTIVE = {"algo.kl": {"coef": 0.5, "place": "loss", "target_nats": 0.01, "horizon_rollouts": 100}, "optim.lr": 1e-2}
WARM_EVAL = {"evaluate.sampling.temperature": 1.0}

# setting -> its new value, and what else stands in both runs
CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "name": ("other", {}), "about": ("something else", {}), "expect": ("much", {}), "seed": (1, {}),
    "model.scratch.alphabet": ("0123456789>+", {}), "model.scratch.model_type": ("qwen2", {}),
    "model.scratch.config": ({"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, {}),
    "model.dtype": ("bfloat16", {}),
    "model.lora.rank": (2, LORA), "model.lora.alpha": (4.0, LORA), "model.lora.dropout": (0.5, LORA),
    "model.lora.targets": (["q_proj"], LORA),
    "tasks.source": ({"ref": "reverse_digits", "length": 2}, {}), "tasks.held_out": (20, {}), "tasks.shuffle": (False, {}),
    "env": ("PARTS:loud", {}),
    "rewards.0.fn": ("exact", {}), "rewards.0.weight": (2.0, {}),
    "rewards.0.timeout_s": (0.05, {"rewards.0": {"fn": "PARTS:slow"}, "train.steps": 1, "tasks.held_out": 0, "train.prompts_per_step": 1}),
    "rewards.0.isolate": (False, {"rewards.0": {"fn": "PARTS:in_which_process"}, "train.steps": 1}),
    "sampling.temperature": (0.7, {}), "sampling.top_k": (3, {}), "sampling.top_p": (0.5, {}), "sampling.min_p": (0.9, {}),
    "sampling.max_new_tokens": (3, {}), "sampling.stop": (["3", "4"], {}), "sampling.end_tokens": (["5"], {}),
    "algo.advantage": ("center", {}), "algo.loss": ("reinforce", {"train.epochs": 2}), "algo.reduce": ("rollout_sum", {}),
    "algo.kl.coef": (5.0, KL_LOSS), "algo.kl.place": ("reward", KL_LOSS), "algo.kl.estimator": ("k2", KL_LOSS),
    "algo.kl.gradient": ("importance_weighted", KL_LOSS), "algo.kl.target_nats": (2.0, ADAPTIVE),
    "algo.kl.horizon_rollouts": (50, ADAPTIVE),
    "algo.constant_groups": ("drop", {}),
    "train.steps": (5, {}), "train.prompts_per_step": (5, {}), "train.samples_per_prompt": (5, {}), "train.epochs": (2, {}),
    "train.minibatches": (2, {}), "train.tokens_per_micro_batch": (12, {}), "train.max_skipped_updates": (2, {"algo.loss": "PARTS:nan"}),
    "train.slots": (9, {}),
    "optim.lr": (1e-3, {}), "optim.betas": ([0.5, 0.5], {}), "optim.eps": (1e-2, {}), "optim.weight_decay": (1.0, {}),
    "optim.clip_norm": (1e-2, {"optim.eps": 1e-3}), "optim.warmup_updates": (5, {}), "optim.schedule": ("linear", {}),
    "optim.final_lr_frac": (0.5, {}),
    "evaluate.every_steps": (2, {}), "evaluate.samples_per_task": (2, WARM_EVAL), "evaluate.success_reward": (0.5, {}),
    "evaluate.sampling.temperature": (1.0, {}), "evaluate.sampling.top_k": (2, WARM_EVAL), "evaluate.sampling.top_p": (0.3, WARM_EVAL),
    "evaluate.sampling.min_p": (0.9, WARM_EVAL), "evaluate.sampling.max_new_tokens": (1, {}),
    "evaluate.sampling.stop": (["3", "4", "5", "6"], WARM_EVAL), "evaluate.sampling.end_tokens": (["3", "4", "5"], WARM_EVAL),
    "checkpoint.every_steps": (3, {}), "checkpoint.keep": (1, {}), "monitor.sinks": (["tensorboard"], {}),
}
ELSEWHERE = {"model.path": "tests of the model room, and of the exported model as a new start"}


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    out = []
    for name, field in model.model_fields.items():
        inner = [t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
        path = f"{prefix}{name}"
        out += leaves(inner[0], f"{path}.0." if "tuple" in str(field.annotation) else f"{path}.") if inner else [path]
    return out


def _types(annotation: Any) -> list[Any]:
    from typing import get_args

    return [annotation, *(t for arg in get_args(annotation) for t in _types(arg))]


def test_every_setting_has_an_entry():
    assert sorted(leaves(Settings)) == sorted([*CHANGED, *ELSEWHERE])


@pytest.fixture(scope="module")
def facts_of(tmp_path_factory):
    """Runs, each once, and what can be seen of them apart from times."""
    parts = tmp_path_factory.mktemp("parts") / "parts_of_the_test.py"
    parts.write_text(PARTS)
    os.environ["TRAINER_PID"] = str(os.getpid())
    known: dict[str, Any] = {}

    def run(changes: dict[str, Any]) -> Any:
        text = json.dumps(changes, sort_keys=True).replace("PARTS", str(parts))
        if text not in known:
            known[text] = _facts(tmp_path_factory.mktemp("run") / "run", json.loads(text))
        return known[text]

    return run


def _facts(folder: Path, changes: dict[str, Any]) -> Any:
    widths = set()
    decode = NativeEngine.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeEngine, "decode", lambda self, token_N, at: (widths.add(len(token_N)), decode(self, token_N, at))[1])
        try:
            Trainer(tiny(changes), out=folder).run()
        except (ValueError, RunError) as error:
            return str(error).replace(str(folder), "")
    settings = (folder / "settings.yaml").read_text()
    report = (folder / "report.html").read_text()
    return {
        "metrics": [{k: v for k, v in r.items() if not k.startswith(("time/", "rate/", "memory/"))} for r in read_metrics(folder)],
        "rollouts": [read_rollouts(f) for f in sorted(folder.glob("*/step-*.parquet"))],
        "checkpoints": {f.parent.name: f.read_text() for f in sorted(folder.glob("checkpoints/*/checksums.json"))},
        "folders": sorted(p.name for p in folder.iterdir()),
        "widths": widths,
        "words": [word for word in ("other", "something else", "much") if word in report and word in settings],
    }


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_is_seen(facts_of, name):
    value, base = CHANGED[name]
    before = facts_of(base)
    after = facts_of({**base, name: value})
    assert before != after


def test_the_same_settings_are_seen_as_the_same(tmp_path):
    assert _facts(tmp_path / "a", {}) == _facts(tmp_path / "b", {})
