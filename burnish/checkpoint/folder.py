"""One checkpoint is one folder, step-000010. It is written beside its place, synced, and renamed: it is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

STATE, SUMS = "state.json", "checksums.json"
NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written. The text says which whole ones there are."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    folder: Path


def write(root: Path, step: int, *, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Checkpoint:
    """Save `tensors` (file name -> tensors) and the JSON data `state`. Raises CheckpointError; older checkpoints stay whole."""
    final = root / f"step-{step:06d}"
    part = root / f".writing-{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name, entries in tensors.items():
            save_file({key: t.detach().contiguous().cpu() for key, t in entries.items()}, part / f"{name}.safetensors")
        (part / STATE).write_text(json.dumps(state, indent=1))
        sums = {file.name: _sha256(file) for file in sorted(part.iterdir())}
        (part / SUMS).write_text(json.dumps(sums, indent=1))
        for file in part.iterdir():
            _sync(file)
        if final.exists():
            shutil.rmtree(final)
        os.rename(part, final)
        _sync(root)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        last = newest(root)
        have = f"the last good one is {last.folder}" if last else "there is no earlier one"
        raise CheckpointError(f"cannot write the checkpoint {final}: {error}; {have}") from error
    return Checkpoint(step, final)


def read(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """(tensors, state) as they were written. Raises DamagedError naming the file that is missing or damaged."""
    try:
        sums = dict(json.loads((folder / SUMS).read_text()))
        if STATE not in sums:
            raise ValueError(f"it does not name {STATE}")
    except (OSError, ValueError, TypeError) as error:
        raise DamagedError(f"{folder} is not a whole checkpoint: {SUMS} cannot be read ({error}){_others(folder)}") from error
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{folder} is damaged: {name} is missing{_others(folder)}")
        if _sha256(file) != expected:
            raise DamagedError(f"{folder} is damaged: {name} is not what was written (its checksum differs){_others(folder)}")
    tensors = {Path(name).stem: load_file(folder / name) for name in sums if name.endswith(".safetensors")}
    return tensors, json.loads((folder / STATE).read_text())


def all_of(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    if not root.is_dir():
        return []
    found = [Checkpoint(int(m[1]), f) for f in root.iterdir() if (m := NAME.fullmatch(f.name)) and (f / SUMS).is_file()]
    return sorted(found, key=lambda c: c.step)


def newest(root: Path) -> Checkpoint | None:
    return (all_of(root) or [None])[-1]


def prune(root: Path, *, keep: int) -> None:
    """Remove all but the newest `keep`, and what a killed writer left."""
    for old in all_of(root)[:-keep]:
        shutil.rmtree(old.folder)
    for rest in root.glob(".writing-*"):
        shutil.rmtree(rest, ignore_errors=True)


def _others(folder: Path) -> str:
    others = [c.folder.name for c in all_of(folder.parent) if c.folder != folder]
    if not others:
        return "; there is no other checkpoint"
    return f"; whole ones beside it: {', '.join(others)} - remove the damaged folder to resume from the newest of them"


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
