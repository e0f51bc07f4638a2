"""T13: every setting, changed, changes something that can be seen, or is refused. A setting without an entry here fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tiny import TINY, tiny_data

from burnish.api import RunError, Trainer
from burnish.config import Algo, Reward, Settings, Tasks
from burnish.config.load import load_recipe
from burnish.engines.native.scheduler import Scheduler
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
def other_tokens(log_ratio, mask):
    kept = mask.clone()
    kept[:, ::2] = False
    return kept.double(), kept
def examples():
    from burnish.types import Example
    return [Example(str(n), f"{n:04}"[-2 - n % 2:] + ">", str(n)[-1] * (1 + n % 2)) for n in range(60)]
def rated():
    from burnish.types import Rated
    return [Rated(str(n), f"{n:02}>", str(n)[-1], ratings=(float(n % 3), float(n % 2))) for n in range(60)]
def graded():
    from burnish.types import Rated
    return [Rated(str(n), f"{n:02}>", str(n)[-1], ratings=(float(n % 2),)) for n in range(60)]
def pairs():
    from burnish.types import Pair
    return [Pair(str(n), f"{n:02}>", str(n)[-1] * (1 + n % 3), "12"[: 1 + n % 2]) for n in range(60)]
def steps():
    from burnish.types import Rated
    first = lambda n, of: of[: 1 + n % 3]
    return [Rated(str(n), f"{n:02}>", first(n, "123"), ratings=first(n, (1.0, 0.0, 1.0)), steps=first(n, (1, 2, 3))) for n in range(60)]
def wide(score_chosen, score_rejected):
    return (1.0 - score_chosen + score_rejected).clamp(min=0)
class loud:
    def start(self, task): return task.prompt
    async def step(self, text):
        from burnish.envs import Reply
        return Reply("0>", done=True)
"""
LORA = {"model.lora": {"rank": 4}}
KL_LOSS = {"algo.kl": {"coef": 0.5, "place": "loss"}, "optim.lr": 1e-2}
ADAPTIVE = {"algo.kl": {"coef": 0.5, "place": "loss", "target_nats": 0.01, "horizon_rollouts": 100}, "optim.lr": 1e-2}
WARM_EVAL = {"evaluate.sampling.temperature": 1.0}


WRITTEN = {
    "tasks": None, "rewards": [], "algo": None, "sampling": {}, "train.prompts_per_step": None, "train.samples_per_prompt": None,
    "train.examples_per_step": 4, "train.steps": 4,
}
DIGITS = {"ref": "copy_digits", "length": 2}
SFT = {**WRITTEN, "loop": "sft", "data": {"source": "PARTS:examples", "held_out": 10}}
PAIRS = {**WRITTEN, "loop": "preference", "data": {"source": {"ref": "pairs_of_tasks", "tasks": DIGITS}, "held_out": 10}}
MOVING = {**PAIRS, "preference": {"refresh_steps": 2}}
LOSS = {"fn": {"ref": "sigmoid", "beta": 0.1}}
WITH_NLL = {**PAIRS, "preference": {"nll_coef": 0.5, "losses": [LOSS]}, "data.source": "PARTS:pairs"}
SCORES = {**PAIRS, "loop": "reward_model"}
RATINGS = {**SCORES, "reward_model": {"loss": "squared_error", "outputs": 2}, "data.source": "PARTS:rated"}
CLASSES = {**SCORES, "reward_model": {"loss": "ordinal", "classes": 2}, "data.source": "PARTS:graded"}
STEPS = {
    **SCORES, "reward_model": {"loss": "step_cross_entropy", "outputs": 2},
    "data.source": {"ref": "steps_of_tasks", "tasks": {"ref": "sort_digits", "length": 3}},
}
MODEL = {"scratch": TINY["model"]["scratch"]}
DISTILL = {**SFT, "loop": "distill", "distill": {"teachers": [{"model": MODEL}]}, "seed": 3}
TEACHERS = {**DISTILL, "distill": {"teachers": [{"model": MODEL}, {"model": {"scratch": {**MODEL["scratch"], "model_type": "qwen2"}}}]}}
BEST = {"algo": None, "sft": {"best_of": 1}}
GAE = {"algo.advantage": {"ref": "gae", "gamma": 1.0, "lam": 0.95}, "train.epochs": 2, "optim.lr": 1e-2, "train.steps": 4}
CRITIC = {**GAE, "critic": {"lr": 1e-2, "model": MODEL}}
CRITIC_LORA = {**GAE, "critic": {"lr": 1e-2, "model": {**MODEL, "lora": {"rank": 4, "dropout": 0.1}}}}
HEAD = {**GAE, "critic": {"kind": "head"}}
COST = {
    "rewards": [{"fn": "positions", "isolate": False}, {"fn": "exact", "isolate": False, "name": "cost", "cost": True}],
    "constraint": {"limit": 0.001}, "tasks": {"source": {"ref": "copy_digits", "length": 1}}, "sampling.max_new_tokens": 1,
    "train.steps": 4, "sampling.temperature": 1.5,
}
ENTROPY = {"algo.entropy": {"coef": 0.04, "target_nats": 5.0}, "optim.lr": 1e-2}
SEVERAL = {
    "tasks": None, "rewards": [], "train.steps": 4, "train.prompts_per_step": 4,
    "environments": [
        {"name": name, "tasks": {"source": {"ref": f"{name}_digits", "length": 2}, "held_out": 5}, "prompts_per_step": 2,
         "rewards": [{"fn": "positions", "isolate": False}]} for name in ("copy", "reverse")
    ],
}
ONE_OF_TWO = {**SEVERAL, "environments.1.prompts_per_step": 1}
REFILL = {"algo.constant_groups": "refill", "tasks": {"source": {"ref": "copy_digits", "length": 1}}, "sampling.max_new_tokens": 1}

# setting -> its new value, and what else stands in both runs
CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "name": ("zebra", {}), "about": ("something else", {}), "expect": ("much", {}), "seed": (1, {}),
    "model.scratch.alphabet": ("0123456789>+", {}), "model.scratch.model_type": ("qwen2", {}),
    "model.scratch.config": ({"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, {}),
    "model.dtype": ("bfloat16", {}),
    "model.lora.rank": (2, LORA), "model.lora.alpha": (4.0, LORA), "model.lora.dropout": (0.5, {**SFT, "model.lora": {"rank": 4}}),
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
    "engine": ({"ref": "native", "slots": 9}, {}), "train.allow_in_sampling": (["min_new_tokens"], {}),
    "sampling.min_new_tokens": (1, {}), "sampling.repetition_penalty": (2.0, {}),
    "sampling.logit_bias": ({"3": 2.0}, {}), "sampling.banned_tokens": (["3", "4"], {}),
    "sampling.guide.json_schema": ({"type": "integer"}, {}), "sampling.guide.regex": ("[0-9]", {}),
    "sampling.guide.grammar": ("start: /1/", {}),
    "evaluate.sampling.min_new_tokens": (2, {"evaluate.sampling.end_tokens": [str(n) for n in range(10)]}),
    "evaluate.sampling.repetition_penalty": (50.0, WARM_EVAL),
    "evaluate.sampling.logit_bias": ({"3": 9.0}, WARM_EVAL), "evaluate.sampling.banned_tokens": ([str(n) for n in range(5)], WARM_EVAL),
    "evaluate.sampling.guide.json_schema": ({"type": "integer", "maximum": 3, "minimum": 1}, {}),
    "evaluate.sampling.guide.regex": ("77", {}), "evaluate.sampling.guide.grammar": ('start: "77"', {}),
    "optim.lr": (1e-3, {}), "optim.betas": ([0.5, 0.5], {}), "optim.eps": (1e-2, {}), "optim.weight_decay": (1.0, {}),
    "optim.clip_norm": (1e-2, {"optim.eps": 1e-3}), "optim.warmup_updates": (5, {}), "optim.schedule": ("linear", {}),
    "optim.final_lr_frac": (0.5, {}),
    "evaluate.every_steps": (2, {}), "evaluate.samples_per_task": (2, WARM_EVAL), "evaluate.success_reward": (0.5, {}),
    "evaluate.sampling.temperature": (1.0, {}), "evaluate.sampling.top_k": (2, WARM_EVAL), "evaluate.sampling.top_p": (0.3, WARM_EVAL),
    "evaluate.sampling.min_p": (0.9, WARM_EVAL), "evaluate.sampling.max_new_tokens": (1, {}),
    "evaluate.sampling.stop": (["3", "4", "5", "6"], WARM_EVAL), "evaluate.sampling.end_tokens": (["3", "4", "5"], WARM_EVAL),
    "checkpoint.every_steps": (3, {}), "checkpoint.keep": (1, {}), "monitor.sinks": (["tensorboard"], {}),
    # methods and where rows come from
    "preset": ("rloo", {"algo": {}}), "loop": ("reward_model", PAIRS),
    "rewards.0.name": ("mine", {}), "rewards.0.normalize": ({"ref": "RunningNorm", "eps": 1e-8, "ddof": 1}, {}),
    "rewards.0.cost": (True, {**COST, "rewards.0.cost": False, "rewards.1.cost": False}),
    "environments.0.name": ("other", SEVERAL), "environments.0.tasks": ({"source": {"ref": "sort_digits", "length": 2}}, SEVERAL),
    "environments.0.env": ("PARTS:loud", SEVERAL), "environments.0.rewards": ([{"fn": "exact", "isolate": False}], SEVERAL),
    "environments.0.algo": ({"advantage": "center"}, SEVERAL), "environments.0.prompts_per_step": (3, ONE_OF_TWO),
    "data.source": ({"ref": "of_tasks", "tasks": DIGITS}, SFT), "data.held_out": (20, SFT), "data.shuffle": (False, SFT),
    "data.max_tokens": (5, SFT), "train.examples_per_step": (5, SFT),
    # policy gradients
    "algo.normalize": ("whiten", {}), "algo.correction.fn": ({"ref": "token_truncate", "high": 0.5}, {}),
    "algo.correction.normalize": (True, {"algo.correction": {"fn": {"ref": "token_truncate", "high": 0.5}}}),
    "algo.correction.denominator": ("kept", {"algo.correction": {"fn": "PARTS:other_tokens"}}),
    "algo.prox": ("interpolated", {"train.epochs": 4, "optim.lr": 1e-2}),
    "algo.entropy.coef": (0.5, {"algo.entropy": {"coef": 0.1}}), "algo.entropy.target_nats": (0.5, ENTROPY),
    "algo.entropy.delta": (0.1, {**ENTROPY, "algo.entropy.max_coef": 1.0}), "algo.entropy.max_coef": (0.01, ENTROPY),
    "algo.refill_rounds": (1, REFILL), "algo.truncated": ("drop", {}),
    "algo.length_penalty": ({"ref": "soft_overlong", "max_tokens": 2, "cache_tokens": 1}, {}),
    "algo.baseline_decay": (0.1, {"algo.advantage": "minus_ema"}), "algo.stop_at_kl_nats": (1e-6, {"train.epochs": 3, "optim.lr": 1e-2}),
    "critic.kind": ("head", GAE | {"critic": {}}), "critic.lr": (1e-3, CRITIC), "critic.coef": (5.0, HEAD),
    "critic.loss": ({"ref": "clipped_error", "clip": 1e-3}, CRITIC), "critic.warmup_steps": (2, CRITIC), "critic.bootstrap": (True, CRITIC),
    "critic.model.scratch.alphabet": ("0123456789>+", CRITIC), "critic.model.scratch.model_type": ("qwen2", CRITIC),
    "critic.model.scratch.config": (
        {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, CRITIC,
    ),
    "critic.model.dtype": ("bfloat16", CRITIC), "critic.model.lora.rank": (2, CRITIC_LORA), "critic.model.lora.alpha": (4.0, CRITIC_LORA),
    "critic.model.lora.dropout": (0.5, CRITIC_LORA), "critic.model.lora.targets": (["q_proj"], CRITIC_LORA),
    "constraint.limit": (0.5, COST), "constraint.kp": (1.0, COST), "constraint.ki": (1.0, COST), "constraint.kd": (1.0, COST),
    "constraint.max_multiplier": (0.001, COST),
    # written answers, pairs, scores, teachers
    "sft.loss": ("dft", SFT), "sft.reduce": ("rollout_sum", SFT), "sft.best_of": (2, BEST), "sft.min_reward": (0.75, BEST),
    "preference.losses.0.fn": ({"ref": "hinge", "beta": 0.1}, WITH_NLL), "preference.losses.0.weight": (0.1, WITH_NLL),
    "preference.nll_coef": (5.0, WITH_NLL), "preference.nll_normalization": ("sequence_sum", WITH_NLL),
    "preference.length_alpha": (0.1, {**PAIRS, "data.source": "PARTS:pairs"}), "preference.weigh_by_policy": (True, PAIRS),
    "preference.reference": ("none", PAIRS), "preference.refresh_steps": (1, MOVING), "preference.refresh_mix": (0.5, MOVING),
    "reward_model.loss": ("PARTS:wide", SCORES), "reward_model.center_coef": (1.0, SCORES), "reward_model.outputs": (1, RATINGS),
    "reward_model.classes": (3, CLASSES), "reward_model.reduce": ("rollout_mean", {**STEPS, "data.source": "PARTS:steps"}),
    "distill.teachers.0.model.scratch.alphabet": ("0123456789>+", DISTILL),
    "distill.teachers.0.model.scratch.model_type": ("qwen2", DISTILL),
    "distill.teachers.0.model.scratch.config": (
        {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, DISTILL,
    ),
    "distill.teachers.0.model.dtype": ("bfloat16", DISTILL), "distill.teachers.0.model.lora": ({}, DISTILL),
    "distill.teachers.0.weight": (5.0, TEACHERS), "distill.divergence": ("reverse_kl", TEACHERS), "distill.temperature": (3.0, TEACHERS),
    "distill.reduce": ("rollout_sum", TEACHERS), "distill.on_policy_frac": (0.9, TEACHERS),
}
ELSEWHERE = {
    "model.path": "tests of the model room, and of the exported model as a new start", "critic.model.path": "as model.path",
    "distill.teachers.0.model.path": "as model.path",
}
REFUSED = {
    "rewards.0.timeout_s": "no reward comes in time", "train.max_skipped_updates": "how a run ends is what it changes",
    "reward_model.outputs": "the data has two ratings",
    "critic.model.scratch.alphabet": "another vocabulary than the policy's", "distill.teachers.0.model.lora": "it is not trained",
    "distill.teachers.0.model.scratch.alphabet": "another vocabulary than the policy's",
    "train.allow_in_sampling": "sampling does not set it", "sampling.min_new_tokens": "not allowed by name",
    "sampling.repetition_penalty": "not allowed by name",
    **dict.fromkeys((f"sampling.guide.{kind}" for kind in ("json_schema", "regex", "grammar")), "the trainer cannot know the guide"),
}
"""Settings whose change ends in an error; a new value of any other has to run."""
AS_ELSEWHERE = {("environments.0.tasks", Tasks), ("environments.0.rewards", Reward), ("environments.0.algo", Algo)}
"""Sections of one setting's place, read by the code that reads them elsewhere."""


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    out = []
    for name, field in model.model_fields.items():
        inner = [t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
        path = f"{prefix}{name}"
        if not inner or (path, inner[0]) in AS_ELSEWHERE or path == "distill.teachers.0.model.lora":
            out.append(path)
        else:
            out += leaves(inner[0], f"{path}.0." if "tuple" in str(field.annotation) else f"{path}.")
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
    widths = [0]
    next_rows = Scheduler.next_rows

    def watched(self: Scheduler, *args: Any) -> Any:
        rows = next_rows(self, *args)
        widths[0] = max(widths[0], len(self.running))
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "next_rows", watched)
        try:
            recipe = folder.with_suffix(".yaml")
            recipe.write_text(json.dumps(tiny_data(changes)))
            Trainer(load_recipe(recipe, note=lambda line: None), out=folder).run()
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
        "words": [word for word in ("zebra", "something else", "much") if word in report and word in settings],
    }


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_is_seen(facts_of, name):
    value, base = CHANGED[name]
    before = facts_of(base)
    after = facts_of({**base, name: value})
    assert isinstance(after, str) == (name in REFUSED), after
    assert before != after


def test_the_same_settings_are_seen_as_the_same(tmp_path):
    assert _facts(tmp_path / "a", {}) == _facts(tmp_path / "b", {})
