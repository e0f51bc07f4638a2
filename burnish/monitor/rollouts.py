"""Every rollout of a step in one parquet file: readable by any parquet reader, and back to stage records without loss."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.monitor.writer import write_atomic
from burnish.types import Group, Rollout, Scored, Task, Turn

SCHEMA = pa.schema([
    ("step", pa.int64()),
    ("group", pa.int32()),                 # groups of the step, in order
    ("task_id", pa.string()),
    ("sample", pa.int32()),
    ("version", pa.int64()),
    ("prompt", pa.string()),               # for reading
    ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),  # null: the prompt is plain text
    ("answer", pa.string()),               # JSON
    ("info", pa.string()),                 # JSON
    ("text", pa.string()),
    ("stop", pa.string()),
    ("reward", pa.float64()),              # null: could not be scored
    ("scores", pa.map_(pa.string(), pa.float64())),
    ("errors", pa.map_(pa.string(), pa.string())),
    ("cost", pa.float64()),                # null: no reward is a cost, or could not be scored
    ("steps", pa.list_(pa.struct([("token", pa.int32()), ("value", pa.float64())]))),     # rewards of steps, by their last token
    ("given", pa.float64()),               # the reward before it was normalised; null: it was not
    ("advantage", pa.float64()),           # null: not trained on, or not known here
    ("tokens", pa.list_(pa.int32())),
    ("token_texts", pa.list_(pa.string())),
    ("sampled", pa.list_(pa.bool_())),
    ("logp_gen", pa.list_(pa.float64())),  # nats
    ("turns", pa.list_(pa.struct([("author", pa.string()), ("start", pa.int32()), ("end", pa.int32()), ("text", pa.string())]))),
])


def write_rollouts(
    path: Path | str,
    step: int,
    groups: Sequence[Group],
    decode: Callable[[int], str],
    *,
    advantages: Sequence[Sequence[float | None]] | None = None,
) -> None:
    """One row a rollout. decode: token id -> its text, for reading. advantages: one a rollout, in the shape of `groups`.

    The file appears complete or not at all. ValueError if a task's answer or info is not plain JSON data.
    """
    text_of = functools.cache(decode)
    if advantages is None:
        advantages = [[None] * len(group.scored) for group in groups]
    rows = [
        _row(step, number, scored, advantage, text_of)
        for number, (group, column) in enumerate(zip(groups, advantages, strict=True))
        for scored, advantage in zip(group.scored, column, strict=True)
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer, compression="zstd")
    write_atomic(Path(path), buffer.getvalue())


def read_rollouts(path: Path | str) -> list[Group]:
    """The groups as they were written; a group without a rollout has no row and is not there."""
    groups: dict[int, list[Scored]] = {}
    for row in read_rows(path):
        groups.setdefault(row["group"], []).append(_scored(row))
    return [Group(scored[0].rollout.task, tuple(scored)) for scored in groups.values()]


def read_rows(path: Path | str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows as plain dictionaries, for pages and notebooks. `scores` and `errors` are dictionaries, answer and info JSON text."""
    rows = pq.read_table(path, columns=list(columns) if columns else None).to_pylist()
    for row in rows:
        for name in {"scores", "errors"} & row.keys():
            row[name] = dict(row[name])
    return rows


def prompt_text(task: Task) -> str:
    """The prompt for reading; the tokens say what the model saw."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in task.prompt)


def _row(step: int, group: int, scored: Scored, advantage: float | None, text_of: Callable[[int], str]) -> dict[str, Any]:
    rollout = scored.rollout
    task = rollout.task
    return {
        "step": step,
        "group": group,
        "task_id": task.id,
        "sample": rollout.sample,
        "version": rollout.version,
        "prompt": prompt_text(task),
        "messages": None if isinstance(task.prompt, str) else [dict(message) for message in task.prompt],
        "answer": _json(task, "answer", task.answer),
        "info": _json(task, "info", dict(task.info)),
        "text": rollout.text,
        "stop": rollout.stop,
        "reward": scored.reward,
        "scores": list(scored.scores.items()),
        "errors": list(scored.errors.items()),
        "cost": scored.cost,
        "steps": [{"token": at, "value": value} for at, value in scored.steps],
        "given": scored.given,
        "advantage": advantage,
        "tokens": rollout.tokens,
        "token_texts": [text_of(token) for token in rollout.tokens],
        "sampled": rollout.sampled,
        "logp_gen": rollout.logp_gen,
        "turns": [{"author": t.author, "start": t.start, "end": t.end, "text": t.text} for t in rollout.turns],
    }


def _json(task: Task, name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"task {task.id}: {name} must be plain JSON data (numbers, texts, lists, mappings): {error}") from error


def _scored(row: dict[str, Any]) -> Scored:
    messages = row["messages"]
    prompt = row["prompt"] if messages is None else tuple(messages)
    rollout = Rollout(
        task=Task(row["task_id"], prompt, json.loads(row["answer"]), json.loads(row["info"])),
        sample=row["sample"],
        tokens=tuple(row["tokens"]),
        sampled=tuple(row["sampled"]),
        logp_gen=tuple(row["logp_gen"]),
        turns=tuple(Turn(t["author"], t["start"], t["end"], t["text"]) for t in row["turns"]),
        stop=row["stop"],
        version=row["version"],
    )
    steps = tuple((step["token"], step["value"]) for step in row["steps"])
    return Scored(rollout, row["reward"], row["scores"], row["errors"], row["cost"], steps, row["given"])
