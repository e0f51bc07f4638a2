"""Trainer: from settings to a finished run. It puts the parts together; everything it calls stands alone as a library."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from burnish import __version__, checkpoint
from burnish.algorithms.penalties import ESTIMATORS, KlController
from burnish.chat.template import end_token_ids
from burnish.checkpoint.claim import FolderError, hold, holds_run
from burnish.config import Sampling, Settings
from burnish.config.load import dump, load_recipe, resumable_changes
from burnish.data.tasks import Cursor, Split, digest
from burnish.engines.native import NativeEngine
from burnish.evaluate.compare import compare
from burnish.evaluate.run import Evaluation, evaluate
from burnish.loops import StepRecord, sync
from burnish.models.export import export
from burnish.models.load import load
from burnish.monitor.ledger import Clock, total
from burnish.monitor.live import Live
from burnish.monitor.report import write_report
from burnish.monitor.rollouts import read_rollouts, write_rollouts
from burnish.monitor.writer import MetricsWriter, read_metrics, write_atomic
from burnish.plan.preflight import ROOMS, examine
from burnish.rewards.call import stop_in_worker
from burnish.rewards.pool import RewardPool
from burnish.rollout import Kept, Visit, assemble, keep, run_groups, summarize
from burnish.trainer import COLUMNS, Algorithm, NonFiniteError, NothingMovedError, Reference, make_state, schedule, train_step
from burnish.types import Batch, Group

MAX_UNSCORED_STEPS = 3


class RunError(RuntimeError):
    """A run that had to stop. The text says why, and how to go on."""


class NoRewardError(RuntimeError):
    """Steps in a row without a single reward."""


STOPS = (NonFiniteError, NothingMovedError, NoRewardError, OSError, SafetensorError, checkpoint.CheckpointError)
"""What ends a run with a text for people and a way to go on."""


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
        cls, recipe: str | Path, *, model: str | None = None, out: str | Path | None = None, resume: str | Path | None = None,
        **settings: Any,
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
        stop_in_worker()
        checked = examine(self.settings)
        with self._claimed():
            try:
                with _Session(self.settings, self.folder, checked.tasks, resuming=self.resuming) as session:
                    for note in checked.notes:
                        session.live.note(f"note: {note}")
                    finished = session.run()
                write_report(self.folder)
                return finished
            except BaseException as error:
                with contextlib.suppress(Exception):     # a page about what there is; the error that ended the run is what counts
                    write_report(self.folder)
                if isinstance(error, checkpoint.DamagedError):
                    raise RunError(str(error)) from error         # tells itself what is left
                if isinstance(error, STOPS):
                    raise RunError(f"{error}\n{self._how_to_go_on()}") from error
                raise

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """The folder, looked at and held, with the settings in it. FolderError or SettingsError where it cannot be used."""
        saved = self.folder / "settings.yaml"
        if self.resuming and not saved.is_file():
            raise FolderError(f"{self.folder} holds no run to resume: there is no settings.yaml in it")
        with hold(self.folder):
            if self.resuming:
                resumable_changes(load_recipe(saved), self.settings)
                last = checkpoint.newest(self.folder / "checkpoints")
                rows = read_metrics(self.folder)
                if last is None and rows and rows[-1]["step"] > self.settings.checkpoint.every_steps:
                    raise FolderError(
                        f"{self.folder} has metrics up to step {rows[-1]['step']} but no whole checkpoint, so resuming would begin anew "
                        f"and remove them; bring {self.folder / 'checkpoints'} back, or start a run in another folder"
                    )
                if last and last.step > self.settings.train.steps:
                    raise FolderError(f"{self.folder} has made {last.step} steps already; set train.steps to more to go on")
            elif holds_run(self.folder):
                how = f"go on with it by resume={str(self.folder)!r} (--resume), or choose another out"
                raise FolderError(f"{self.folder} already holds a run; {how}")
            try:
                write_atomic(saved, dump(self.settings).encode())
            except OSError as error:
                raise FolderError(f"cannot write to {saved}: {error.strerror}; choose another folder with out (--out)") from error
            yield

    def _how_to_go_on(self) -> str:
        last = checkpoint.newest(self.folder / "checkpoints")
        if last is None:
            return "no checkpoint was written yet"
        return f"the newest checkpoint, with finite weights, is {last.folder}; go on from it with: burnish train --resume {self.folder}"


class _Session:
    """The parts of a run while it runs."""

    def __init__(self, settings: Settings, folder: Path, tasks: Split, *, resuming: bool) -> None:
        self.settings, self.folder, self.tasks = settings, folder, tasks
        self.began = time.perf_counter()
        self.saved = checkpoint.newest(folder / "checkpoints") if resuming else None
        self.start_step = self.saved.step if self.saved else 0
        self.resuming = resuming
        self.stack = contextlib.ExitStack()
        self.unscored_steps = 0

    def __enter__(self) -> _Session:
        s = self.settings
        try:
            self.clock = Clock()
            self.live = self.stack.enter_context(Live(s.train.steps, name=s.name, start_step=self.start_step))
            self.live.status("checking the rewards")
            self.pool = self.stack.enter_context(RewardPool(s.rewards, log=self.folder / "rewards.log"))
            self.cursor = Cursor(self.tasks.train, seed=s.seed, shuffle=s.tasks.shuffle)
            self.live.status("loading the model")
            self.loaded = load(s.model, seed=s.seed)
            kl = KlController(s.algo.kl.coef, s.algo.kl.target_nats, s.algo.kl.horizon_rollouts) if s.algo.kl else None
            self.state = make_state(
                self.loaded.module, dtype=s.model.dtype, betas=s.optim.betas, eps=s.optim.eps, weight_decay=s.optim.weight_decay, kl=kl
            )
            self.engine = NativeEngine(
                self.state.policy, self.loaded.tokenizer, context_tokens=self.loaded.context_tokens, slots=s.train.slots
            )
            self.reference = Reference(self.state.policy) if s.algo.kl else None
            self._restore()
            sinks = [sink.bind(room=ROOMS["monitor.sinks"])() for sink in s.monitor.sinks]
            known = self.start_step if self.saved else -1 if self.resuming else None   # -1: nothing of the run is kept
            self.writer = self.stack.enter_context(MetricsWriter(self.folder, sinks, known, settings=s.model_dump(mode="json")))
            if self.saved and self.writer.last_step != self.start_step:
                self.live.note(f"note: metrics.jsonl ends before step {self.start_step} of the checkpoint; its rows are incomplete")
            if self.resuming and self.saved is None:
                self.live.note("note: no checkpoint was written yet, so the run starts over")
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
        self.parts = {
            "engine": self.engine, "tokenizer": self.loaded.tokenizer, "env": env, "scorer": self.pool, "seed": s.seed, "clock": self.clock,
        }
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
        advantage = s.algo.advantage.bind(provided=("reward",), room=ROOMS["algo.advantage"])
        if kl is None:
            return assemble(groups, advantage=advantage)
        rollouts = [item.rollout for g in groups for item in g.scored]
        self.live.status("scoring with the reference")
        logp_ref = self.reference.logprobs(
            rollouts, sampling=s.sampling, tokens_per_micro_batch=s.train.tokens_per_micro_batch
        )
        penalty = None
        if kl.place == "reward":
            sums = [_kl_sum(r.logp_gen, ref, r.sampled, kl.estimator) for r, ref in zip(rollouts, logp_ref, strict=True)]
            penalty = [self.state.kl.coef * nats for nats in sums]
        return assemble(groups, advantage=advantage, logp_ref=logp_ref, kl_penalty=penalty)

    def _updater(self) -> Callable[[Batch], dict[str, float]]:
        s, state = self.settings, self.state
        kl = s.algo.kl
        algo = Algorithm(
            loss=s.algo.loss.bind(provided=COLUMNS, room=ROOMS["algo.loss"]),
            reduce=s.algo.reduce.bind(provided=("loss", "mask", "num_tokens", "num_rollouts"), room=ROOMS["algo.reduce"]),
            kl={"estimator": kl.estimator, "gradient": kl.gradient} if kl and kl.place == "loss" and kl.coef > 0 else None,
        )
        lr_of = partial(
            schedule, total=s.train.steps * s.train.epochs * s.train.minibatches, lr=s.optim.lr,
            warmup_updates=s.optim.warmup_updates, kind=s.optim.schedule, final_lr_frac=s.optim.final_lr_frac,
        )
        step = partial(
            train_step, state, algo=algo, sampling=s.sampling, lr_of=lr_of, clip_norm=s.optim.clip_norm,
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
        self._stop_without_rewards(record)
        due = s.evaluate.every_steps and step % s.evaluate.every_steps == 0
        if self.tasks.held_out and (due or step == s.train.steps):
            metrics |= self._evaluate(step)
        self._log(step, metrics, record)
        if (step % s.checkpoint.every_steps == 0 or step == s.train.steps) and not self.unscored_steps:
            self._save()

    def _stop_without_rewards(self, record: StepRecord) -> None:
        """One step may meet a judge that is down; several in a row are a reward that does not work."""
        scored = [s for g in record.groups for s in g.scored]
        self.unscored_steps = 0 if any(s.reward is not None for s in scored) else self.unscored_steps + 1
        if self.unscored_steps >= min(MAX_UNSCORED_STEPS, self.settings.train.steps):
            reasons = Counter(f"{name}: {text}" for s in scored for name, text in s.errors.items())
            text, count = reasons.most_common(1)[0]
            raise NoRewardError(
                f"not one rollout of the last {self.unscored_steps} steps could be scored, so there is nothing to learn from; "
                f"in step {record.step}, {count} of {len(scored)} times: {text}"
            )

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
                passed = self.settings.train.epochs * sum(len(r.tokens) for r in record.batch.rows)
                metrics["rate/train_tokens_per_s"] = passed / times["time/train_s"]
        metrics["memory/peak_gib"] = _peak_gib()
        self.writer.write(step, metrics | times)
        self.live.update(step, metrics | times)

    def _save(self) -> None:
        self.live.status("writing a checkpoint")
        with self.clock.phase("checkpoint"):
            root = self.folder / "checkpoints"
            checkpoint.write(
                root, self.state.step, tensors=self.state.tensors(),
                state={
                    "burnish": __version__, "train": self.state.numbers(), "cursor": self.cursor.position,
                    "tasks": digest(self.tasks),
                },
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
            (self.folder / "summary.json").unlink(missing_ok=True)       # what it says of "after" is no longer the end
        if self.saved is None:
            return
        tensors, state = checkpoint.read(self.saved.folder)
        if state["tasks"] != digest(self.tasks):
            raise FolderError(
                f"the tasks are not those that {self.folder} was trained on (tasks.source gives others now, or another split), so training "
                "and held-out tasks would mix; bring the old tasks back, or start a new run"
            )
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
        rest = self.clock.cut()
        summary = {
            "name": s.name, "seed": s.seed, "steps": s.train.steps, "wall_s": time.perf_counter() - self.began,
            "ledger": total([*read_metrics(self.folder), rest]), **self._compare(),
        }
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=1).encode())
        return Finished(self.folder, summary)

    def _compare(self) -> dict[str, Any]:
        """Held-out before and after, read back from what was written, so that a resumed run compares with its own start."""
        if not self.tasks.held_out:
            return {}
        files = [self.folder / "evals" / f"step-{n:06d}.parquet" for n in (0, self.settings.train.steps)]
        if not files[1].is_file():
            self._evaluate(self.settings.train.steps)
        if not files[0].is_file():
            self.live.note(f"note: {files[0]} is gone, so there is no comparison with the start")
            return {}
        first, last = (read_rollouts(file) for file in files)
        return compare(first, last, success_reward=self.settings.evaluate.success_reward)


def _kl_sum(logp: Sequence[float], logp_ref: Sequence[float], sampled: Sequence[bool], estimator: str) -> float:
    """Estimated KL to the reference in nats, summed over the sampled tokens of one rollout."""
    at = torch.tensor(sampled)
    values = ESTIMATORS[estimator](torch.tensor(logp, dtype=torch.float64), torch.tensor(logp_ref, dtype=torch.float64))
    return float(torch.where(at, values, 0.0).sum())


def _advantages(groups: Sequence[Group], kept: Kept, batch: Batch) -> list[list[float | None]]:
    """The advantage of each rollout of the step, None where it was not trained on."""
    trained = {
        (item.rollout.task.id, item.rollout.sample): row.adv if math.isfinite(row.adv) else None
        for item, row in zip((i for g in kept.groups for i in g.scored), batch.rows, strict=True)
    }
    return [[trained.get((i.rollout.task.id, i.rollout.sample)) for i in g.scored] for g in groups]


def _peak_gib() -> float:
    """Highest memory so far: of the accelerator where there is one, else of the process."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
