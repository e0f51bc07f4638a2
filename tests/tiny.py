"""A whole run in a second or two: the settings that tests change one field of."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from burnish import checkpoint
from burnish.api import Trainer
from burnish.api.session import Session
from burnish.config import Settings
from burnish.monitor.writer import read_metrics

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "scratch": {
            "alphabet": "0123456789>",
            "config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            },
        }
    },
    "tasks": {"source": {"ref": "copy_digits", "length": 2}, "held_out": 10},
    "rewards": [{"fn": "positions", "isolate": False}],
    "sampling": {"max_new_tokens": 2},
    "algo": {"loss": {"ref": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}},
    "train": {"steps": 6, "prompts_per_step": 4, "samples_per_prompt": 4},
    "optim": {"lr": 3e-3, "warmup_updates": 2, "schedule": "cosine"},
    "evaluate": {"every_steps": 3, "sampling": {"max_new_tokens": 2}},
    "checkpoint": {"every_steps": 2},
    "monitor": {"sinks": []},
}

WRITTEN = {
    "tasks": None, "rewards": [], "algo": None, "sampling": {}, "train.prompts_per_step": None, "train.samples_per_prompt": None,
    "train.examples_per_step": 8, "data": {"source": {"ref": "of_tasks", "tasks": {"ref": "copy_digits", "length": 2}}, "held_out": 5},
}
TEACHERS = {"teachers": [{"model": {"scratch": {**TINY["model"]["scratch"], "model_type": "qwen2"}}}]}
METHODS = {
    "sft": {**WRITTEN, "loop": "sft", "train.minibatches": 2},
    "distill": {**WRITTEN, "loop": "distill", "distill": {**TEACHERS, "on_policy_frac": 0.5}},
    "on-policy distillation": {"algo": None, "distill": TEACHERS},
    "teachers' advantage": {"algo.advantage": "teacher_gap", "distill": {**TEACHERS, "divergence": None}},
    "best of n": {"algo": None, "sft": {"best_of": 2}},
    "entropy": {"algo.entropy": {"coef": 0.01, "target_nats": 5.0}},
    "baseline": {"algo.advantage": "minus_ema"},
    "refill": {"algo.constant_groups": "refill", "train.epochs": 2},
    "greedy baseline": {"algo.advantage": "above_greedy"},
    "exact kl": {"algo.kl": {"coef": 0.1, "estimator": "exact", "target_nats": 0.1}, "model.lora": {"rank": 4}},
}
"""Changes that make a run of another method."""


def tiny(changes: Mapping[str, Any] | None = None) -> Settings:
    """TINY with changes by dotted name."""
    return Settings.model_validate_json(json.dumps(tiny_data(changes)))


def tiny_data(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same as plain data."""
    raw = copy.deepcopy(TINY)
    for name, value in (changes or {}).items():
        *path, last = name.split(".")
        node = raw
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[int(last) if isinstance(node, list) else last] = copy.deepcopy(value)
    return raw


TIMES = ("time/", "rate/", "memory/")


def facts(folder: Path) -> dict[str, Any]:
    """What must be the same where nothing but time differs: the last checkpoint's files and numbers, and all metrics."""
    last = checkpoint.newest(folder / "checkpoints").folder
    return {
        "sums": json.loads((last / "checksums.json").read_text()), "state": json.loads((last / "state.json").read_text()),
        "metrics": [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(folder)],
    }


def whole_and_resumed(folder: Path, changes: Mapping[str, Any], *, stop_in_step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a run, and of the same run that broke off after the updates of a step and was resumed."""
    settings = tiny(changes)
    Trainer(settings, out=folder / "whole").run()
    end_step = Session.end_step

    def breaking(session: Session, step: int, *rest: Any) -> None:
        if step == stop_in_step:
            raise KeyboardInterrupt
        end_step(session, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "end_step", breaking)
        with pytest.raises(KeyboardInterrupt):
            Trainer(settings, out=folder / "parts").run()
    Trainer(settings, resume=folder / "parts").run()
    return facts(folder / "whole"), facts(folder / "parts")
