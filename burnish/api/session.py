"""The parts of a run while it runs: model, clock, metrics, checkpoints, evaluation. What is special to a loop stands beside it."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from burnish import __version__, checkpoint
from burnish.chat.template import by_ids, end_token_ids
from burnish.checkpoint.claim import FolderError
from burnish.config import Environment, Sampling, Settings
from burnish.data.tasks import Cursor
from burnish.engines.base import EngineError
from burnish.evaluate.compare import compare
from burnish.evaluate.run import Evaluation, evaluate, success_of
from burnish.models.export import export
from burnish.models.load import Loaded
from burnish.monitor.ledger import Clock, total
from burnish.monitor.live import Live
from burnish.monitor.rollouts import read_rollouts, write_rollouts
from burnish.monitor.writer import MetricsWriter, read_metrics, write_atomic
from burnish.plan.preflight import ROOMS, Checked, environments
from burnish.plan.references import ENGINE_ARGS, problems_of_engine
from burnish.rewards.pool import Norm, Reading, RewardPool, reward_name
from burnish.trainer import TrainState, make_state, schedule
from burnish.trainer.state import publish
from burnish.types import Group, Rollout, Scored

Rates = Callable[[Mapping[str, float]], dict[str, float]]
"""The times of a step by metric -> rates."""


class NoRewardError(RuntimeError):
    """Steps in a row without a single reward."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run left: the folder, the finished model in it, and the summary that is also in summary.json."""

    folder: Path
    summary: Mapping[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"


class Method(Protocol):
    """What a loop puts beside the session: it is made before the checkpoint is read, runs after."""

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """One environment of a run, ready to be visited."""

    name: str
    env: Callable[[], Any]
    pool: RewardPool
    setting: Environment
    norms: Mapping[str, Norm]


@dataclass(frozen=True, slots=True)
class _Scorer:
    """A pool with the reading that its scores get."""

    pool: RewardPool
    reading: Reading

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        return self.pool.score(rollouts, self.reading)


class Session:
    """Opened by `with`; `run` does the rest.

    A method of a loop registers what is to be saved and come back: `states` (name -> TrainState), `cursors`, `controls` (dataclasses
    of plain numbers) and `tensors` (name -> object with tensors() and load()); and `measures`, functions of the step that evaluate.
    """

    def __init__(
        self, settings: Settings, folder: Path, checked: Checked, *, resuming: bool, load: Callable[[Settings], Loaded],
        make_method: Callable[[Session], Method], kind: Callable[[Any], Any],
    ) -> None:
        self.settings, self.folder, self.checked = settings, folder, checked
        self.began = time.perf_counter()
        self.saved = checkpoint.newest(folder / "checkpoints") if resuming else None
        self.start_step = self.saved.step if self.saved else 0
        self.resuming = resuming
        self.stack = contextlib.ExitStack()
        self.states: dict[str, TrainState] = {}
        self.cursors: dict[str, Cursor] = {}
        self.controls: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        self.measures: list[Callable[[int], dict[str, float]]] = []
        self.may_save = True
        self._load, self._make_method, self._kind = load, make_method, kind

    def __enter__(self) -> Session:
        s = self.settings
        try:
            self.clock = Clock()
            self.live = self.stack.enter_context(Live(s.train.steps, name=s.name, start_step=self.start_step))
            self.live.status("checking the rewards")
            self.places = [self._place(e) for e in environments(s)]
            self.live.status("loading the model")
            self.loaded = self._load(s)
            self.state = self.add_state("policy", self.loaded, kind=self._kind)
            self.engine = None
            if s.loop != "reward_model":
                make = s.engine.bind(provided=ENGINE_ARGS, room=ROOMS["engine"])
                self.engine = make(
                    policy=self.state.policy, tokenizer=self.loaded.tokenizer, context_tokens=self.loaded.context_tokens
                )
                self.stack.callback(self.engine.close)
                if problems := list(problems_of_engine(s, self.engine.abilities)):      # as it was made, not as its class is
                    raise EngineError("\n".join(problems))
                if s.samples:                    # the trainer scores by ids
                    self.settings = s.model_copy(update={"sampling": by_ids(s.sampling, self.loaded.tokenizer)})
            if self.checked.held_out_tasks:
                self.measures.append(self._evaluate)
            self.method = self._make_method(self)
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
        if self.start_step == 0 and self.measures:
            self.log(0, self.measure(0))
        self.method.run()
        return self._finish()

    # what methods are made of

    def add_state(self, name: str, loaded: Loaded, **values: Any) -> TrainState:
        """A model ready to train, whose weights and moments are saved and come back."""
        s = self.settings
        self.states[name] = make_state(
            loaded.module, betas=s.optim.betas, eps=s.optim.eps, weight_decay=s.optim.weight_decay, **{"dtype": s.model.dtype, **values}
        )
        return self.states[name]

    def step_values(self, *, lr: float | None = None, sampling: Sampling | None = None) -> dict[str, Any]:
        """The arguments of train_step that follow from the settings."""
        s = self.settings
        return {
            "sampling": sampling or s.sampling, "clip_norm": s.optim.clip_norm,
            "epochs": s.train.epochs, "minibatches": s.train.minibatches, "tokens_per_micro_batch": s.train.tokens_per_micro_batch,
            "max_skipped": s.train.max_skipped_updates, "seed": s.seed,
            "dropout": bool(s.model.lora and s.model.lora.dropout), "progress": partial(self.live.status, "training"),
            "lr_of": partial(
                schedule, total=s.train.steps * s.train.epochs * s.train.minibatches, lr=s.optim.lr if lr is None else lr,
                warmup_updates=s.optim.warmup_updates, kind=s.optim.schedule, final_lr_frac=s.optim.final_lr_frac,
            ),
        }

    def parts(self, place: Place, *, rewards: Literal["plain", "normalized", "learning"] = "plain") -> dict[str, Any]:
        """What rollout.run_groups needs beside tasks and sampling.

        rewards: as they are, for evaluation; normalised where the settings say so; or that, after the statistics took them in.
        """
        reading = Reading(
            partial(self.loaded.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            {} if rewards == "plain" else place.norms, learns=rewards == "learning",
        )
        return {
            "engine": self.engine, "tokenizer": self.loaded.tokenizer, "env": place.env, "scorer": _Scorer(place.pool, reading),
            "seed": self.settings.seed, "clock": self.clock,
        }

    def end_step(self, step: int, metrics: dict[str, float], rates: Rates | None = None) -> None:
        """Evaluate where it is due, write the metrics row, and then the checkpoint, so that a checkpoint has all rows of its steps."""
        s = self.settings
        due = s.evaluate.every_steps and step % s.evaluate.every_steps == 0
        if self.measures and (due or step == s.train.steps):
            metrics = metrics | self.measure(step)
        self.log(step, metrics, rates)
        if (step % s.checkpoint.every_steps == 0 or step == s.train.steps) and self.may_save:
            self._save()

    def measure(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with self.clock.phase("evaluate"):
            for one in self.measures:
                metrics |= one(step)
        return metrics

    def log(self, step: int, metrics: dict[str, float], rates: Rates | None = None) -> None:
        times = self.clock.cut()
        metrics = metrics | (rates(times) if rates else {}) | {"memory/peak_gib": _peak_gib()}
        self.writer.write(step, metrics | times)
        self.live.update(step, metrics | times)

    def save_rollouts(
        self, kind: str, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]] | None = None
    ) -> None:
        decode = self.loaded.tokenizer.decode
        write_rollouts(self.folder / kind / f"step-{step:06d}.parquet", step, groups, lambda t: decode([t]), advantages=advantages)

    def _place(self, e: Environment) -> Place:
        log = self.folder / (f"rewards-{e.name}.log" if e.name else "rewards.log")
        norms = {
            reward_name(r): r.normalize.bind(room=ROOMS["rewards.normalize"])() for r in e.rewards if r.normalize is not None
        }
        self.controls |= {f"{e.name}/{name}/norm" if e.name else f"{name}/norm": norm for name, norm in norms.items()}
        return Place(e.name, e.env.bind(room=ROOMS["env"]), self.stack.enter_context(RewardPool(e.rewards, log=log)), e, norms)

    # evaluation by answering held-out tasks

    def _evaluate(self, step: int) -> dict[str, float]:
        e = self.settings.evaluate
        groups: list[Group] = []
        for place in self.places:
            tasks = self.checked.tasks[place.name].held_out
            if tasks:
                found = evaluate(
                    tasks, samples_per_task=e.samples_per_task, sampling=e.sampling, success_reward=e.success_reward,
                    progress=partial(self.live.status, "evaluating"), **self.parts(place),
                )
                groups += found.groups
        self.save_rollouts("evals", step, groups)
        return Evaluation(tuple(groups), success_of(groups, e.success_reward)).metrics()

    # checkpoints

    def _save(self) -> None:
        self.live.status("writing a checkpoint")
        with self.clock.phase("checkpoint"):
            root = self.folder / "checkpoints"
            tensors = {
                _file(name, kind): value for name, state in self.states.items() for kind, value in state.tensors().items()
            } | {name: one.tensors() for name, one in self.tensors.items()}
            checkpoint.write(
                root, self.state.step, tensors={name: held for name, held in tensors.items() if held},
                state={
                    "burnish": __version__, "train": {name: state.numbers() for name, state in self.states.items()},
                    "cursors": {name: cursor.position for name, cursor in self.cursors.items()},
                    "controls": {name: asdict(control) for name, control in self.controls.items()}, "data": self.checked.digests,
                },
            )
            checkpoint.prune(root, keep=self.settings.checkpoint.keep)

    def _restore(self) -> None:
        if self.resuming:
            for kind in ("rollouts", "evals"):
                for file in (self.folder / kind).glob("step-*.parquet"):
                    if int(file.stem.removeprefix("step-")) > self.start_step or self.saved is None:
                        file.unlink()
            (self.folder / "summary.json").unlink(missing_ok=True)       # what it says of "after" is no longer the end
        if self.saved is None:
            return
        tensors, saved = checkpoint.read(self.saved.folder)
        if saved["data"] != self.checked.digests:
            raise FolderError(
                f"the data is not what {self.folder} was trained on (a source gives something else now, or another split), so training "
                "and held-out parts would mix; bring the old data back, or start a new run"
            )
        for name, state in self.states.items():
            state.restore({kind: tensors.get(_file(name, kind), {}) for kind in ("weights", "adam")}, saved["train"][name])
        for name, one in self.tensors.items():
            one.load(tensors.get(name, {}))
        for name, cursor in self.cursors.items():
            cursor.position = saved["cursors"][name]
        for name, control in self.controls.items():
            for key, value in saved["controls"][name].items():
                setattr(control, key, value)
        if self.engine is not None:
            publish(self.state, self.engine)
        self.live.note(f"resumed from {self.saved.folder}")

    # beginning and end

    def _save_facts(self) -> None:
        import transformers

        s = self.settings
        evaluates = s.loop != "sync" or self.checked.held_out_tasks
        used = {"sampling": s.sampling if s.samples else None, "evaluate.sampling": s.evaluate.sampling if evaluates else None}
        ids = {name: self._ends(sampling) for name, sampling in used.items() if sampling is not None}
        facts = {
            "burnish": __version__, "torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0],
            "device": str(self.state.policy.device), "threads": torch.get_num_threads(), "model": self.loaded.source,
            "parameters": sum(p.numel() for p in self.loaded.module.parameters()),
            "trained_parameters": sum(m.numel() for m in self.state.weights.masters.values()),
            "end_tokens": ids, "train_tasks": self.checked.num_train, "held_out_tasks": self.checked.num_held_out, "argv": sys.argv,
        }
        write_atomic(self.folder / "run.json", json.dumps(facts, indent=1).encode())

    def _ends(self, sampling: Sampling) -> dict[str, int]:
        tokenizer = self.loaded.tokenizer
        return {tokenizer.convert_ids_to_tokens(i): i for i in end_token_ids(tokenizer, sampling.end_tokens)}

    def _finish(self) -> Finished:
        s = self.settings
        self.live.status("writing the model and the report")
        sampling = s.sampling if s.loop == "sync" else s.evaluate.sampling
        ends = end_token_ids(self.loaded.tokenizer, sampling.end_tokens)
        export(self.loaded.module, self.loaded.tokenizer, self.folder / "model", end_token_ids=ends, stop=sampling.stop)
        rest = self.clock.cut()
        summary = {
            "name": s.name, "seed": s.seed, "steps": s.train.steps, "wall_s": time.perf_counter() - self.began,
            "ledger": total([*read_metrics(self.folder), rest]), **self._compare(), "measured": self._measured(),
        }
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=1).encode())
        return Finished(self.folder, summary)

    def _compare(self) -> dict[str, Any]:
        """Held-out before and after, read back from what was written, so that a resumed run compares with its own start."""
        if not self.checked.held_out_tasks:
            return {}
        files = [self.folder / "evals" / f"step-{n:06d}.parquet" for n in (0, self.settings.train.steps)]
        if not files[1].is_file():
            self._evaluate(self.settings.train.steps)
        if not files[0].is_file():
            self.live.note(f"note: {files[0]} is gone, so there is no comparison with the start")
            return {}
        first, last = (read_rollouts(file) for file in files)
        return compare(first, last, success_reward=self.settings.evaluate.success_reward)

    def _measured(self) -> dict[str, dict[str, float]]:
        """Every eval metric at the first and at the last evaluation."""
        rows = [row for row in read_metrics(self.folder) if any(name.startswith("eval/") for name in row)]
        if len(rows) < 2:
            return {}
        names = [name for name in rows[0] if name.startswith("eval/") and name in rows[-1]]
        return {name: {"before": rows[0][name], "after": rows[-1][name]} for name in names}


def _file(state: str, kind: str) -> str:
    return kind if state == "policy" else f"{state}-{kind}"


def _peak_gib() -> float:
    """Highest memory so far: of the accelerator where there is one, else of the process."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def reasons_of(scored: Sequence[Scored]) -> list[str]:
    return [f"{name}: {text}" for one in scored for name, text in one.errors.items()]
