"""A rollout as one line of JSON and back. Numbers travel as base64 of their bytes: exact, and four times faster than digits."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from burnish.types import Prompt, Rollout, Task, Turn


def dump_line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def dump_rollout(rollout: Rollout) -> dict[str, Any]:
    """TypeError where the task's answer or info is not plain JSON data."""
    task = rollout.task
    return {
        "task": [task.id, task.prompt, task.answer, dict(task.info)],
        "sample": rollout.sample,
        "tokens": b64encode(array("q", rollout.tokens).tobytes()).decode("ascii"),
        "sampled": bytes(rollout.sampled).hex(),
        "logp_gen": b64encode(array("d", rollout.logp_gen).tobytes()).decode("ascii"),
        "turns": [[t.author, t.start, t.end, t.text] for t in rollout.turns],
        "stop": rollout.stop,
        "version": rollout.version,
    }


def load_rollout(data: dict[str, Any]) -> Rollout:
    task_id, prompt, answer, info = data["task"]
    return Rollout(
        task=Task(id=task_id, prompt=_prompt(prompt), answer=answer, info=info),
        sample=data["sample"],
        tokens=_numbers("q", data["tokens"]),
        sampled=tuple(map(bool, bytes.fromhex(data["sampled"]))),
        logp_gen=_numbers("d", data["logp_gen"]),
        turns=tuple(Turn(*turn) for turn in data["turns"]),
        stop=data["stop"],
        version=data["version"],
    )


def _prompt(prompt: str | Sequence[Any]) -> Prompt:
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _numbers(kind: str, text: str) -> tuple[Any, ...]:
    values = array(kind)
    values.frombytes(b64decode(text))
    return tuple(values)
