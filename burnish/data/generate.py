"""reasoning-gym entries, generated in a child process: `python -m burnish.data.generate`, one JSON request in, one reply out.

Why a child: some datasets walk over Python sets, so their entries change with the hash seed of the process. A child with a fixed one
gives the same entries in every run, and keeps the library's second of imports out of the trainer.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import burnish

INSTALL = "reasoning_gym needs the package reasoning-gym: pip install 'burnish[gym]'"


TAGS = frozenset({"tuple of", "fraction of", "pairs"})
"""pairs: a mapping whose keys are not all texts, as a list of [key, value]."""


def generate(requests: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Entries of each request {name, size, seed, config}, packed as plain JSON. ValueError with the reason if one cannot be made."""
    try:
        line = json.dumps(requests)
    except TypeError as error:
        raise ValueError(f"the datasets' settings must be plain data: {error}") from None
    root = str(Path(burnish.__path__[0]).resolve().parent)
    path = os.pathsep.join([entry or os.getcwd() for entry in sys.path] + [root])
    child = subprocess.run(
        [sys.executable, "-P", "-m", "burnish.data.generate"],
        input=line.encode("ascii"), stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}, check=False,
    )
    if child.returncode:
        raise RuntimeError(f"generating reasoning-gym tasks ended with code {child.returncode}; its message stands above")
    reply = json.loads(child.stdout)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["entries"]


def pack(value: Any) -> Any:
    """As plain JSON. What JSON lacks becomes a mapping with one of the keys of TAGS."""
    if isinstance(value, tuple):
        return {"tuple of": [pack(v) for v in value]}
    if isinstance(value, Fraction):
        return {"fraction of": [value.numerator, value.denominator]}
    if isinstance(value, list):
        return [pack(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and value.keys() <= TAGS):
            return {str(key): pack(v) for key, v in value.items()}
        return {"pairs": [[pack(key), pack(v)] for key, v in value.items()]}
    if value is None or isinstance(value, bool):
        return value
    for plain in (str, int, float):  # numpy's own texts and floats are subclasses
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return pack(value.tolist())
    raise TypeError(f"an entry holds a {type(value).__name__}, which has no plain JSON form")


def unpack(value: Any) -> Any:
    """What `pack` was given, numpy's types aside."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {"tuple of"}:
            return tuple(unpack(v) for v in value["tuple of"])
        if value.keys() == {"fraction of"}:
            return Fraction(*value["fraction of"])
        if value.keys() == {"pairs"}:
            return {unpack(key): unpack(v) for key, v in value["pairs"]}
        return {key: unpack(v) for key, v in value.items()}
    return value


def create(name: str, **values: Any) -> Any:
    """The dataset. ValueError that names the nearest one, or the setting that does not fit."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"{INSTALL} ({error})") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {sorted(DATASETS)}"
        raise ValueError(f"reasoning-gym has no dataset {name!r}{hint}")
    takes = sorted(DATASETS[name][1].__dataclass_fields__.keys() - {"size", "seed"})
    if unknown := [key for key in values if key not in {"size", "seed", *takes}]:
        near = difflib.get_close_matches(unknown[0], takes, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reasoning-gym's {name} takes no {unknown}; it takes {takes}{hint}")
    try:
        return reasoning_gym.create_dataset(name, **values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses the settings of {name}: {error or type(error).__name__}") from error


def main() -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # what the library prints must not get into the reply
    try:
        made = []
        for request in json.load(sys.stdin):
            dataset = create(request["name"], size=request["size"], seed=request["seed"], **request["config"])
            made.append([pack(dataset[i]) for i in range(request["size"])])
        reply: dict[str, Any] = {"entries": made}
    except ValueError as error:
        reply = {"error": str(error)}
    with os.fdopen(replies, "w", encoding="ascii") as out:
        json.dump(reply, out)


if __name__ == "__main__":
    main()
