"""What a run directory holds, read for the report: bounded in size however long the run, and whole or not, it is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from burnish.evaluate.measure import interval, paired
from burnish.monitor.measured import ANSWERING
from burnish.monitor.metrics import metric
from burnish.monitor.rollouts import read_rows
from burnish.monitor.writer import MetricsError, read_metrics

MAX_POINTS = 600
MAX_EVAL_FILES = 200
MAX_STEPS_SHOWN = 9
MAX_FAILED_STEPS_SHOWN = 4
MAX_TOKENS_SHOWN = 700
MAX_CHARS = 4000
MAX_LABEL_CHARS = 22
MAX_SETTINGS_CHARS = 60_000
MAX_EXAMPLES = 12
_STEP = re.compile(r"step-(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """Held-out accuracy at one step; without the evaluation's file there is no interval."""

    step: int
    accuracy_frac: float
    low: float | None
    high: float | None
    num_items: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The first and the last step that were evaluated, and metric -> {before, after}."""

    steps: tuple[int, int]
    metrics: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class RunData:
    run_dir: Path
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    settings_text: str
    run: dict[str, Any]
    summary: dict[str, Any] | None
    evals: list[EvalPoint]
    measured: Measured | None          # first against last evaluation, by held-out metrics other than those of answers to tasks
    paired: dict[str, Any] | None      # first against last evaluation, as in summary.json; only where there is no summary
    rollouts: list[dict[str, Any]]     # a bounded choice, ready for the page
    examples: list[dict[str, Any]]
    success_reward: float
    problems: list[str]                # what is missing or cannot be read


class _Notes:
    """Reads what can be read and keeps a line about the rest: a report is made of runs that crashed, too."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def attempt(self, what: str, read: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return read()
        except FileNotFoundError:
            self.problems.append(f"{what} is not there")
        except (OSError, ValueError, KeyError, TypeError, YAMLError) as error:
            self.problems.append(f"{what} cannot be read: {type(error).__name__}: {str(error)[:300]}")
        return otherwise


def read_run(run_dir: Path) -> RunData:
    """Read RUN for the report. FileNotFoundError if there is no such folder; anything else that is missing becomes a note."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run directory {run_dir}")
    notes = _Notes()
    rows = notes.attempt("metrics.jsonl", lambda: _rows(run_dir), [])
    settings_text = notes.attempt("settings.yaml", (run_dir / "settings.yaml").read_text, "")
    settings = notes.attempt("settings.yaml", lambda: _mapping(YAML(typ="safe").load(settings_text)), {}) if settings_text else {}
    run = notes.attempt("run.json", lambda: _mapping(json.loads((run_dir / "run.json").read_text())), {})
    summary = None
    if (run_dir / "summary.json").exists():
        summary = notes.attempt("summary.json", lambda: _mapping(json.loads((run_dir / "summary.json").read_text())), None)
    success_reward = _get(settings, "evaluate", "success_reward", default=1.0)
    return RunData(
        run_dir, rows, settings, _cut(settings_text, MAX_SETTINGS_CHARS), run, summary,
        evals=_evals(run_dir, rows, success_reward, notes),
        measured=_measured(rows),
        paired=None if summary else notes.attempt("the evaluations", lambda: _paired(run_dir, success_reward), None),
        rollouts=_choose(run_dir, rows, settings, notes),
        examples=_examples(run_dir, summary, notes),
        success_reward=success_reward,
        problems=notes.problems,
    )


def thin(rows: Sequence[Mapping[str, Any]], most: int = MAX_POINTS) -> tuple[list[dict[str, float]], int]:
    """At most about `most` rows: each stands for k neighbours, joined by the reduction of each metric. Returns (rows, k).

    A sum is shown as the mean of a step, so that the height of a curve does not depend on k.
    """
    every = max(1, math.ceil(len(rows) / most))
    if every == 1:
        return [dict(row) for row in rows], 1
    return [_join(rows[i : i + every]) for i in range(0, len(rows), every)], every


def _join(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    joined: dict[str, float] = {"step": rows[-1]["step"]}
    for name in {name for row in rows for name in row if "/" in name}:
        values = [row[name] for row in rows if name in row]
        reduction = _reduction(name)
        if reduction == "last":
            joined[name] = values[-1]
        else:
            joined[name] = max(values) if reduction == "max" else math.fsum(values) / len(values)
    return joined


def _reduction(name: str) -> str:
    try:
        return metric(name).reduction
    except KeyError:
        return "mean"


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    if not (run_dir / "metrics.jsonl").exists():
        raise FileNotFoundError
    rows = read_metrics(run_dir)
    if not rows:
        raise MetricsError("it has no row yet")
    return rows


def _evals(run_dir: Path, rows: Sequence[Mapping[str, Any]], success_reward: float, notes: _Notes) -> list[EvalPoint]:
    files = step_files(run_dir / "evals")
    read = set(_spread(sorted(files), MAX_EVAL_FILES))
    points = []
    for row in rows:
        if (accuracy := row.get("eval/accuracy_frac")) is None:
            continue
        step = row["step"]
        found = None
        if step in read:
            path = files[step]
            found = notes.attempt(f"evals/{path.name}", lambda path=path: _bounds(path, success_reward), None)
        points.append(EvalPoint(step, accuracy, *(found or (None, None, None))))
    return points


def _measured(rows: Sequence[Mapping[str, Any]]) -> Measured | None:
    found = [row for row in rows if any(name.startswith("eval/") and name not in ANSWERING for name in row)]
    if len(found) < 2:
        return None
    first, last = found[0], found[-1]
    names = [name for name in first if name.startswith("eval/") and name in last]
    return Measured((first["step"], last["step"]), {name: {"before": first[name], "after": last[name]} for name in names})


def _bounds(path: Path, success_reward: float) -> tuple[float | None, float | None, int] | None:
    """(low, high, number of items) of the mean over tasks; a task with no scored sample has no value."""
    items = _items(path, success_reward)
    if not items:
        return None
    found = interval(list(items.values()))
    return found.low, found.high, found.num_items


def _items(path: Path, success_reward: float) -> dict[str, float]:
    """task -> share of its scored samples that are correct."""
    tasks: dict[str, list[float]] = {}
    for row in read_rows(path, ["task_id", "reward"]):
        if row["reward"] is not None:
            tasks.setdefault(row["task_id"], []).append(float(row["reward"] >= success_reward))
    return {task: sum(t) / len(t) for task, t in tasks.items()}


def _paired(run_dir: Path, success_reward: float) -> dict[str, Any] | None:
    files = step_files(run_dir / "evals")
    if len(files) < 2:
        return None
    first, last = (_items(files[step], success_reward) for step in (min(files), max(files)))
    if not (both := sorted(first.keys() & last.keys())):
        return None
    found = paired([first[task] for task in both], [last[task] for task in both])
    return {
        "difference_frac": found.difference, "low": found.low, "high": found.high, "p": found.p, "method": found.method,
        "num_items": len(both),
    }


def step_files(folder: Path) -> dict[int, Path]:
    """step -> its parquet file."""
    if not folder.is_dir():
        return {}
    return {int(m[1]): path for path in sorted(folder.iterdir()) if (m := _STEP.fullmatch(path.name))}


def _choose(run_dir: Path, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], notes: _Notes) -> list[dict[str, Any]]:
    """Training rollouts of steps spread over the run and of steps with failures; the same held-out tasks first and last."""
    failed = [row["step"] for row in rows if row.get("rollout/not_scored_count")]
    chosen: list[dict[str, Any]] = []
    expected = {"rollouts": makes_rollouts(settings), "evals": makes_rollouts(settings) or bool(settings.get("tasks"))}
    for where, most, pick in (("rollouts", MAX_STEPS_SHOWN, _telling), ("evals", 2, _first_tasks)):
        files = step_files(run_dir / where)
        if not files and expected[where]:
            notes.problems.append(f"there are no {'evaluations' if where == 'evals' else 'rollouts'} on disk")
        steps = set(_spread(sorted(files), most))
        if where == "rollouts":
            steps |= set(_spread([step for step in failed if step in files], MAX_FAILED_STEPS_SHOWN))
        for step in sorted(steps):
            path = files[step]
            read = notes.attempt(f"{where}/{path.name}", lambda path=path: read_rows(path), [])
            chosen += [_for_page(row, "held-out" if where == "evals" else "training", why) for row, why in pick(read)]
    return chosen


def makes_rollouts(settings: Mapping[str, Any]) -> bool:
    """Whether the run learns from rollouts; a loop on written answers may make some beside them."""
    return settings.get("loop", "sync") == "sync"


def _first_tasks(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The same tasks at every evaluation, whatever their reward, so that they can be compared."""
    by_task: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], row)
    return [(by_task[task], "same tasks before and after") for task in sorted(by_task)[:6]]


def _telling(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Best, middle and worst reward of a step, and what went wrong. Ties go to the first."""
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])
    failed = [row for row in rows if row["reward"] is None or row["errors"]]
    picks = [(row, "failed") for row in failed[:2]]
    if scored:
        picks += [(scored[0], "best"), (scored[len(scored) // 2], "middle"), (scored[-1], "worst")]
    picks += [(row, "cut off") for row in rows if row["stop"] in ("max_tokens", "context")][:1]
    seen: set[int] = set()
    return [(row, why) for row, why in picks if not (id(row) in seen or seen.add(id(row)))]


def _for_page(row: dict[str, Any], where: str, why: str) -> dict[str, Any]:
    """A rollout as the page wants it: `who` has one letter a token, p(rompt) s(ampled) e(nvironment)."""
    who = ["s" if sampled else "p" for sampled in row["sampled"]]
    for turn in row["turns"]:
        if turn["author"] == "env":
            who[turn["start"] : turn["end"]] = "e" * (turn["end"] - turn["start"])
    keep, left_out = _window(who)
    take = lambda values: [values[i] for i in keep]  # noqa: E731
    return {
        "where": where, "why": why, "step": row["step"], "task": row["task_id"], "label": _tail(row["prompt"]),
        "sample": row["sample"], "version": row["version"],
        "stop": row["stop"], "reward": row["reward"], "advantage": row["advantage"],
        "scores": row["scores"], "errors": {name: _cut(text, 600) for name, text in row["errors"].items()},
        "answer": _cut(_text(json.loads(row["answer"])), 600), "num_tokens": len(who), "num_sampled": sum(row["sampled"]),
        "left_out": left_out, "gap": MAX_TOKENS_SHOWN // 2 if left_out else None,
        "who": "".join(take(who)), "ids": take(row["tokens"]), "texts": take(row["token_texts"]),
        "logp": [float(f"{v:.4g}") if math.isfinite(v) else None for v in take(row["logp_gen"] or [math.nan] * len(who))],
    }


def _tail(prompt: str) -> str:
    """The end of a prompt in one line: where the question usually stands."""
    line = " ".join(prompt.split())
    return line if len(line) <= MAX_LABEL_CHARS else "..." + line[-MAX_LABEL_CHARS:]


def _window(who: Sequence[str]) -> tuple[list[int], int]:
    """Which tokens are shown: all, or the last of the prompt and both ends of the rest."""
    if len(who) <= MAX_TOKENS_SHOWN:
        return list(range(len(who))), 0
    half = MAX_TOKENS_SHOWN // 2
    first = next((i for i, w in enumerate(who) if w != "p"), len(who))
    begin = max(0, min(first - half // 2, len(who) - MAX_TOKENS_SHOWN))
    keep = [*range(begin, begin + half), *range(len(who) - half, len(who))]
    return keep, len(who) - len(keep)


def _examples(run_dir: Path, summary: Mapping[str, Any] | None, notes: _Notes) -> list[dict[str, Any]]:
    """Held-out answers before and after: those of the summary, or else the first tasks of the first and last evaluation."""
    if summary and summary.get("examples"):
        return [_example(example) for example in summary["examples"][:MAX_EXAMPLES]]
    files = step_files(run_dir / "evals")
    if len(files) < 2:
        return []
    columns = ["task_id", "sample", "prompt", "answer", "text", "reward"]
    first, last = (
        {(r["task_id"], r["sample"]): r for r in notes.attempt(f"evals/{files[s].name}", lambda s=s: read_rows(files[s], columns), [])}
        for s in (min(files), max(files))
    )
    both = sorted(first.keys() & last.keys())[:MAX_EXAMPLES]
    return [
        _example({
            "task_id": key[0], "prompt": first[key]["prompt"], "answer": json.loads(first[key]["answer"]),
            "before": first[key]["text"], "after": last[key]["text"],
            "before_reward": first[key]["reward"], "after_reward": last[key]["reward"],
        })
        for key in both
    ]


def _example(example: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: _cut(_text(example.get(name)).strip(), MAX_CHARS) for name in ("task_id", "prompt", "answer", "before", "after")}
    return texts | {name: example.get(name) for name in ("before_reward", "after_reward")}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(m, Mapping) and "content" in m for m in value):
        return "\n\n".join(f"{m.get('role', '')}: {m['content']}" for m in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _spread(items: Sequence[int], most: int) -> list[int]:
    """First, last and evenly spaced ones between; at most `most`."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, found {type(value).__name__}")
    return value


def _get(settings: Mapping[str, Any], *path: str, default: Any = None) -> Any:
    """A value of the effective settings as they were saved, or the default where the file lacks it."""
    value: Any = settings
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Metric names that occur, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row if "/" in name))
