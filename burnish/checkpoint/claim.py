"""A run's folder belongs to one process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class FolderError(ValueError):
    """A run's folder that cannot be used as asked."""


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make the folder where it is missing and keep others out of it. The system lets go when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderError(f"another process is working on the run in {folder}; wait for it, or stop it first") from None
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}; choose another folder with out (--out)") from error
    try:
        yield
    finally:
        lock.release()


def holds_run(folder: Path) -> bool:
    """Whether a run has left something there that must not be written over; a start that failed has not."""
    metrics = folder / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or (folder / "checkpoints").is_dir()
