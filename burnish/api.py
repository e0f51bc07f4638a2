"""Trainer: from settings to a finished run. It puts the parts together; everything it calls stands alone as a library."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from burnish import __version__, checkpoint
from burnish.algorithms.penalties import ESTIMATORS, KlController
from burnish.chat.template import end_token_ids
from burnish.config import Sampling, Settings
from burnish.config.load import dump, load_recipe
from burnish.data.tasks import Cursor, Split, split
from burnish.engines.native import NativeEngine
from burnish.evaluate import measure
from burnish.evaluate.run import Evaluation, evaluate, success_of
from burnish.loops import StepRecord, sync
from burnish.models.export import export
from burnish.models.load import Loaded, load
from burnish.models.policy import Policy
from burnish.monitor.ledger import Clock, total
from burnish.monitor.live import Live
from burnish.monitor.report import write_report
from burnish.monitor.rollouts import read_rollouts, write_rollouts
from burnish.monitor.writer import MetricsWriter, read_metrics, write_atomic
from burnish.plan.preflight import check
from burnish.rewards.pool import RewardPool
from burnish.rollout import Kept, Visit, assemble, keep, run_groups, summarize
from burnish.trainer import Algorithm, NonFiniteError, Reference, TrainState, schedule, train_step
from burnish.trainer.optim import adamw
from burnish.trainer.precision import Weights
from burnish.types import Batch, Group

ROOMS = {
    "advantage": "burnish.algorithms.advantages", "loss": "burnish.algorithms.policy_losses", "reduce": "burnish.algorithms.reduce",
    "env": "burnish.envs", "source": "burnish.data.sources", "sink": "burnish.monitor.sinks",
}


class RunError(RuntimeError):
    """A run that had to stop. The text says why, and how to go on."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run left: the folder, the finished model in it, and the summary that is also in summary.json."""

    folder: Path
    summary: Mapping[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"


class Trainer:
    """One run of one recipe.

    out: the run's folder, runs/NAME by default; it must not hold a run yet. resume: the folder of a run to go on with.
    """

    def __init__(self, settings: Settings, *, out: str | Path | None = None, resume: str | Path | None = None) -> None:
        self.settings = settings
        self.resuming = resume is not None
        self.folder = Path(resume if resume is not None else out if out is not None else Path("runs") / settings.name)

    @classmethod
    def from_recipe(
        cls, recipe: str | Path, *, model: str | None = None, out: str | Path | None = None, resume: str | Path | None = None, **settings: Any
    ) -> Trainer:
        """A shipped recipe by name, or a YAML file. Other arguments are settings by name: steps=50, lr=1e-5, or
        **{"tasks.held_out": 100}; `model` is short for model.path.
        """
        if model is not None:
            settings = {"model.path": str(model), **settings}
        return cls(load_recipe(recipe, overrides=settings), out=out, resume=resume)

    def run(self) -> Finished:
        """Train, evaluate, and leave a model that plain transformers loads. Raises before any weight is loaded where the
        settings cannot work, and RunError where the run had to stop.
        """
        notes = check(self.settings)
        self._claim_folder()
        with _Session(self.settings, self.folder, self.resuming) as session:
            for note in notes:
                session.live.note(f"note: {note}")
            try:
                return session.run()
            except (NonFiniteError, OSError, checkpoint.CheckpointError) as error:
                raise RunError(f"{error}\n{self._how_to_go_on()}") from error

    def _claim_folder(self) -> None:
        if self.resuming and not (self.folder / "settings.yaml").is_file():
            raise ValueError(f"{self.folder} holds no run to resume: there is no settings.yaml in it")
        if not self.resuming and (self.folder / "settings.yaml").exists():
            raise ValueError(f"{self.folder} already holds a run; go on with it by resume={str(self.folder)!r} (--resume), or choose another out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / "settings.yaml", dump(self.settings).encode())
        except OSError as error:
            raise ValueError(f"cannot write to {self.folder}: {error.strerror}; choose another folder with out (--out)") from error

    def _how_to_go_on(self) -> str:
        last = checkpoint.newest(self.folder / "checkpoints")
        if last is None:
            return "no checkpoint was written yet"
        return f"the newest checkpoint, with finite weights, is {last.folder}; go on from it with: burnish train --resume {self.folder}"


class _Session:
    """The parts of a run while it runs."""

    def __init__(self, settings: Settings, folder: Path, resuming: bool) -> None:
        self.settings, self.folder = settings, folder
        self.began = time.perf_counter()
        self.saved = checkpoint.newest(folder / "checkpoints") if resuming else None
        self.start_step = self.saved.step if self.saved else 0
        self.resuming = resuming
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _Session:
        s = self.settings
        try:
            self.clock = Clock()
            self.live = self.stack.enter_context(Live(s.train.steps, name=s.name, start_step=self.start_step))
            self.live.status("checking the rewards")
            self.pool = self.stack.enter_context(RewardPool(s.rewards))
            self.live.status("making tasks")
            self.tasks = _tasks(s)
            self.cursor = Cursor(self.tasks.train, seed=s.seed, shuffle=s.tasks.shuffle)
            self.live.status("loading the model")
            self.loaded = load(s.model, seed=s.seed)
            self.state = make_state(self.loaded, s)
            self.engine = make_engine(self.state.policy, self.loaded, slots=s.train.slots)
            self.reference = Reference(self.state.policy) if s.algo.kl else None
            self._restore()
            sinks = [sink.bind(room=ROOMS["sink"])() for sink in s.monitor.sinks]
            self.writer = self.stack.enter_context(
                MetricsWriter(self.folder, sinks, self.start_step if self.saved else -1 if self.resuming else None, settings=s.model_dump(mode="json"))
            )
            self._save_facts()
        except BaseException:
            self.stack.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def run(self) -> Finished:
        s, state = self.settings, self.state
        env = s.env.bind(room=ROOMS["env"])
        self.parts = dict(
            engine=self.engine, tokenizer=self.loaded.tokenizer, env=env, scorer=self.pool, seed=s.seed, clock=self.clock
        )
        if self.tasks.held_out and self.start_step == 0:
            self._log(0, self._evaluate(0))
        sync(
            state, steps=s.train.steps, next_visits=self._next_visits, roll=self._roll,
            keep=partial(keep, constant_groups=s.algo.constant_groups), assemble=self._assemble, update=self._updater(),
            engine=self.engine, clock=self.clock, taps=[self._tap],
        )
        return self._finish()

    # what the loop calls

    def _next_visits(self) -> list[Visit]:
        """The next tasks. A task that comes again has its samples numbered on."""
        n, size = self.settings.train.prompts_per_step, len(self.tasks.train)
        seen = [at // size for at in range(self.cursor.position, self.cursor.position + n)]
        return [Visit(task, epoch) for task, epoch in zip(self.cursor.next(n), seen, strict=True)]

    def _roll(self, visits: list[Visit]) -> list[Group]:
        return run_groups(
            visits, sampling=self.settings.sampling, samples_per_prompt=self.settings.train.samples_per_prompt,
            progress=partial(self.live.status, "generating"), **self.parts,
        )

    def _assemble(self, groups: Sequence[Group]) -> Batch:
        """Advantages, with the reference's log-probs and the KL penalty where the algorithm has them."""
        s, kl = self.settings, self.settings.algo.kl
        advantage = s.algo.advantage.bind(provided=("reward",), room=ROOMS["advantage"])
        if kl is None:
            return assemble(groups, advantage=advantage)
        rollouts = [item.rollout for g in groups for item in g.scored]
        self.live.status("scoring with the reference")
        logp_ref = self.reference.logprobs(
            rollouts, sampling=_distribution(s.sampling), tokens_per_micro_batch=s.train.tokens_per_micro_batch
        )
        penalty = None
        if kl.place == "reward":
            penalty = [self.state.kl.coef * _kl_sum(r.logp_gen, ref, r.sampled, kl.estimator) for r, ref in zip(rollouts, logp_ref, strict=True)]
        return assemble(groups, advantage=advantage, logp_ref=logp_ref, kl_penalty=penalty)

    def _updater(self) -> Callable[[Batch], dict[str, float]]:
        s, state = self.settings, self.state
        kl = s.algo.kl
        algo = Algorithm(
            loss=s.algo.loss.bind(provided=_columns(), room=ROOMS["loss"]),
            reduce=s.algo.reduce.bind(provided=("loss", "mask", "num_tokens", "num_rollouts"), room=ROOMS["reduce"]),
            kl={"estimator": kl.estimator, "gradient": kl.gradient} if kl and kl.place == "loss" and kl.coef > 0 else None,
        )
        lr_of = partial(
            schedule, total=s.train.steps * s.train.epochs * s.train.minibatches, lr=s.optim.lr,
            warmup_updates=s.optim.warmup_updates, kind=s.optim.schedule, final_lr_frac=s.optim.final_lr_frac,
        )
        step = partial(
            train_step, state, algo=algo, sampling=_distribution(s.sampling), lr_of=lr_of, clip_norm=s.optim.clip_norm,
            epochs=s.train.epochs, minibatches=s.train.minibatches, tokens_per_micro_batch=s.train.tokens_per_micro_batch,
            max_skipped=s.train.max_skipped_updates, seed=s.seed, dropout=bool(s.model.lora and s.model.lora.dropout),
            progress=partial(self.live.status, "training"),
        )

        def update(batch: Batch) -> dict[str, float]:
            metrics = step(batch)
            if state.kl is not None:
                metrics["train/kl_coef"] = state.kl.coef
                sums = [_kl_sum(row.logp_gen, row.logp_ref, row.sampled, "k3") for row in batch.rows]
                if sums:
                    state.kl.update(sum(sums) / len(sums), len(sums))
            return metrics

        return update

    # what reads along

    def _tap(self, record: StepRecord) -> None:
        s, step = self.settings, record.step
        metrics = summarize(record.groups, record.kept, success_reward=s.evaluate.success_reward) | record.metrics
        self._save_rollouts("rollouts", step, record.groups, record)
        due = s.evaluate.every_steps and step % s.evaluate.every_steps == 0
        if self.tasks.held_out and (due or step == s.train.steps):
            metrics |= self._evaluate(step)
        self._log(step, metrics, record)
        if step % s.checkpoint.every_steps == 0 or step == s.train.steps:
            self._save()

    def _evaluate(self, step: int) -> dict[str, float]:
        e = self.settings.evaluate
        with self.clock.phase("evaluate"):
            result: Evaluation = evaluate(
                self.tasks.held_out, samples_per_task=e.samples_per_task, sampling=e.sampling, success_reward=e.success_reward,
                progress=partial(self.live.status, "evaluating"), **self.parts,
            )
            self._save_rollouts("evals", step, result.groups)
        return result.metrics()

    def _log(self, step: int, metrics: dict[str, float], record: StepRecord | None = None) -> None:
        times = self.clock.cut()
        if record is not None:
            sampled = sum(i.rollout.num_sampled for g in record.groups for i in g.scored)
            if times.get("time/generate_s"):
                metrics["rate/generate_tokens_per_s"] = sampled / times["time/generate_s"]
            if times.get("time/train_s") and metrics.get("train/tokens_count"):
                metrics["rate/train_tokens_per_s"] = sum(len(r.tokens) for r in record.batch.rows) / times["time/train_s"]
        metrics["memory/peak_gib"] = _peak_gib()
        self.writer.write(step, metrics | times)
        self.live.update(step, metrics | times)

    def _save(self) -> None:
        self.live.status("writing a checkpoint")
        with self.clock.phase("checkpoint"):
            root = self.folder / "checkpoints"
            checkpoint.write(
                root, self.state.step, tensors=self.state.tensors(),
                state={"burnish": __version__, "train": self.state.numbers(), "cursor": self.cursor.position},
            )
            checkpoint.prune(root, keep=self.settings.checkpoint.keep)

    def _save_rollouts(self, kind: str, step: int, groups: Sequence[Group], record: StepRecord | None = None) -> None:
        advantages = _advantages(groups, record.kept, record.batch) if record else None
        decode = self.loaded.tokenizer.decode
        write_rollouts(self.folder / kind / f"step-{step:06d}.parquet", step, groups, lambda t: decode([t]), advantages=advantages)

    # beginning and end

    def _restore(self) -> None:
        if self.resuming:
            for kind in ("rollouts", "evals"):
                for file in (self.folder / kind).glob("step-*.parquet"):
                    if int(file.stem.removeprefix("step-")) > self.start_step or self.saved is None:
                        file.unlink()
        if self.saved is None:
            return
        tensors, state = checkpoint.read(self.saved.folder)
        self.state.restore(tensors, state["train"])
        self.cursor = Cursor(self.tasks.train, seed=self.settings.seed, shuffle=self.settings.tasks.shuffle, position=state["cursor"])
        self.engine.load(self.state.version)
        self.live.note(f"resumed from {self.saved.folder}")

    def _save_facts(self) -> None:
        import transformers

        s = self.settings
        ids = {"sampling": self._ends(s.sampling), "evaluate.sampling": self._ends(s.evaluate.sampling)}
        facts = {
            "burnish": __version__, "torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0],
            "device": str(self.state.policy.device), "threads": torch.get_num_threads(), "model": self.loaded.source,
            "parameters": sum(p.numel() for p in self.loaded.module.parameters()),
            "trained_parameters": sum(m.numel() for m in self.state.weights.masters.values()),
            "end_tokens": ids, "train_tasks": len(self.tasks.train), "held_out_tasks": len(self.tasks.held_out), "argv": sys.argv,
        }
        write_atomic(self.folder / "run.json", json.dumps(facts, indent=1).encode())

    def _ends(self, sampling: Sampling) -> dict[str, int]:
        tokenizer = self.loaded.tokenizer
        return {tokenizer.convert_ids_to_tokens(i): i for i in end_token_ids(tokenizer, sampling.end_tokens)}

    def _finish(self) -> Finished:
        s = self.settings
        self.live.status("writing the model and the report")
        ends = end_token_ids(self.loaded.tokenizer, s.sampling.end_tokens)
        export(self.loaded.module, self.loaded.tokenizer, self.folder / "model", end_token_ids=ends, stop=s.sampling.stop)
        summary = {
            "name": s.name, "seed": s.seed, "steps": s.train.steps, "wall_s": time.perf_counter() - self.began,
            "ledger": total(read_metrics(self.folder)), **self._compare(),
        }
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=1).encode())
        write_report(self.folder)
        return Finished(self.folder, summary)

    def _compare(self) -> dict[str, Any]:
        """Held-out before and after, read back from what was written, so that a resumed run compares with its own start."""
        if not self.tasks.held_out:
            return {}
        e = self.settings.evaluate
        first, last = (read_rollouts(self.folder / "evals" / f"step-{n:06d}.parquet") for n in (0, self.settings.train.steps))
        before, after = success_of(first, e.success_reward), success_of(last, e.success_reward)
        ids = [t.id for t in self.tasks.held_out]
        paired = measure.paired([before[i] for i in ids], [after[i] for i in ids])
        test = asdict(paired)
        return {
            "before": _accuracy(before), "after": _accuracy(after), "examples": _examples(first, last),
            "paired": {"difference_frac": test.pop("difference"), **test},
        }


def make_state(loaded: Loaded, settings: Settings) -> TrainState:
    """The model on its device in its precision, its optimizer, and the KL coefficient."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    loaded.module.to(device)
    weights = Weights(loaded.module, dtype=settings.model.dtype)
    o, kl = settings.optim, settings.algo.kl
    return TrainState(
        policy=Policy(loaded.module), weights=weights,
        optimizer=adamw(weights, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay),
        kl=KlController(kl.coef, kl.target_nats, kl.horizon_rollouts) if kl else None,
    )


def make_engine(policy: Policy, loaded: Loaded, *, slots: int) -> NativeEngine:
    return NativeEngine(
        policy, loaded.tokenizer, context_tokens=loaded.context_tokens, slots=slots,
        end_token_ids=lambda sampling: end_token_ids(loaded.tokenizer, sampling.end_tokens),
    )


def _tasks(s: Settings) -> Split:
    return split(s.tasks.source.bind(room=ROOMS["source"])(), held_out=s.tasks.held_out, seed=s.seed)


def _columns() -> Sequence[str]:
    from burnish.trainer import COLUMNS

    return COLUMNS


def _distribution(sampling: Sampling) -> dict[str, float]:
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}


def _kl_sum(logp: Sequence[float], logp_ref: Sequence[float], sampled: Sequence[bool], estimator: str) -> float:
    """Estimated KL to the reference in nats, summed over the sampled tokens of one rollout."""
    at = torch.tensor(sampled)
    values = ESTIMATORS[estimator](torch.tensor(logp, dtype=torch.float64), torch.tensor(logp_ref, dtype=torch.float64))
    return float(torch.where(at, values, 0.0).sum())


def _advantages(groups: Sequence[Group], kept: Kept, batch: Batch) -> list[list[float | None]]:
    """The advantage of each rollout of the step, None where it was not trained on."""
    trained = {
        (item.rollout.task.id, item.rollout.sample): row.adv
        for item, row in zip((i for g in kept.groups for i in g.scored), batch.rows, strict=True)
    }
    return [[trained.get((i.rollout.task.id, i.rollout.sample)) for i in g.scored] for g in groups]


def _accuracy(success: Mapping[str, float | None]) -> dict[str, float]:
    known = [v for v in success.values() if v is not None]
    if not known:
        return {"num_items": 0}
    i = measure.interval(known)
    return {"accuracy_frac": i.mean, "low": i.low, "high": i.high, "num_items": i.num_items}


def _examples(first: Sequence[Group], last: Sequence[Group], count: int = 12) -> list[dict[str, Any]]:
    """Held-out tasks answered before and after: half of those that changed, half of the rest, in their own order."""
    pairs = list(zip(first, last, strict=True))
    changed = [p for p in pairs if p[0].scored[0].reward != p[1].scored[0].reward]
    same = [p for p in pairs if p[0].scored[0].reward == p[1].scored[0].reward]
    chosen = changed[: max(count // 2, count - len(same))] + same[: max(count // 2, count - len(changed))]
    return [
        {
            "task_id": before.task.id, "prompt": before.scored[0].rollout.turns[0].text if before.scored[0].rollout.turns else "",
            "answer": before.task.answer, "before": before.scored[0].rollout.text, "after": after.scored[0].rollout.text,
            "before_reward": before.scored[0].reward, "after_reward": after.scored[0].reward,
        }
        for before, after in chosen
    ]


def _peak_gib() -> float:
    """Highest memory so far: of the accelerator where there is one, else of the process."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
