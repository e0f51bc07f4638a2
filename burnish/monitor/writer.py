"""metrics.jsonl: one JSON object a step, in order, repaired on resume; and the sinks that get the same rows."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from burnish.monitor.metrics import finite
from burnish.monitor.sinks import Sink

FILE = "metrics.jsonl"
_NAME = re.compile(r"[a-z]+/\S+")


class MetricsError(ValueError):
    """A metrics file or a row that breaks the rules."""


class MetricsWriter:
    """Appends one row a step to RUN/metrics.jsonl and hands it to each sink.

    resume_step: None for a new run; otherwise the last step that the loaded checkpoint contains. Rows of later steps and
    a line that a crash cut short are removed from the file first.
    A metric that is NaN or infinite is left out of the row and named under "not_finite".
    The file is on disk when `write` returns. A sink that fails later than at its start is reported once and left alone:
    the run and metrics.jsonl do not depend on it.
    """

    def __init__(
        self,
        run_dir: Path | str,
        sinks: Sequence[Sink] = (),
        resume_step: int | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step = _prepare(self.path, resume_step)
        self.sink_errors: dict[str, str] = {}
        self._sinks: list[Sink] = []
        self._file = open(self.path, "ab", buffering=0)
        try:
            for sink in sinks:
                sink.start(self.path.parent, dict(settings or {}), resume_step)
                self._sinks.append(sink)
        except BaseException:
            self.close()
            raise

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps must rise. OSError if the disk refuses the row; the file then ends with the row before it."""
        if self.last_step is not None and step <= self.last_step:
            raise MetricsError(f"{self.path}: step {step} is not after step {self.last_step}, which is written already")
        _check(step, metrics)
        values, not_finite = finite(metrics)
        row = {"step": step, **values} | ({"not_finite": not_finite} if not_finite else {})
        self._append(json.dumps(row).encode() + b"\n")
        self.last_step = step
        for sink in list(self._sinks):
            self._hand_to(sink, step, values)

    def close(self) -> None:
        self._file.close()
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close()
            except Exception as error:
                self._report(sink, error)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)
            why = f"cannot write a row to {self.path}: {error.strerror or error}; the rows before it are kept"
            raise OSError(error.errno or errno.EIO, why) from error

    def _hand_to(self, sink: Sink, step: int, values: dict[str, float]) -> None:
        try:
            sink.write(step, values)
        except Exception as error:
            self._report(sink, error)
            self._sinks.remove(sink)

    def _report(self, sink: Sink, error: Exception) -> None:
        name = type(sink).__name__
        self.sink_errors[name] = f"{type(error).__name__}: {error}"
        warnings.warn(f"sink {name} failed and gets no more rows ({self.sink_errors[name]}); {self.path} has them all", stacklevel=3)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The rows of a run, also of one that is still going: a last line that is not complete yet is left out."""
    path = Path(run_dir) / FILE
    if not path.exists():
        return []
    return [row for row, _ in _parse(path, path.read_bytes())]


def write_atomic(path: Path, data: bytes) -> None:
    """The file has its old content or all of the new one, at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _prepare(path: Path, resume_step: int | None) -> int | None:
    """Bring the file to the state after `resume_step`; returns its last step."""
    data = path.read_bytes() if path.exists() else b""
    if resume_step is None:
        if data:
            raise MetricsError(f"{path} already holds the metrics of a run; resume that run, or choose another folder")
        return None
    kept = [(row, end) for row, end in _parse(path, data) if row["step"] <= resume_step]
    if not kept:
        path.write_bytes(b"")
        return None
    row, end = kept[-1]
    with open(path, "r+b") as file:
        file.truncate(end)
        if not data[:end].endswith(b"\n"):
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    return row["step"]


def _parse(path: Path, data: bytes) -> list[tuple[dict[str, Any], int]]:
    """Rows with the byte after each. Only the last line may be torn: a crash cuts the end of a file, not its middle."""
    rows: list[tuple[dict[str, Any], int]] = []
    begin = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        begin += len(line)
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError) as error:
            if begin == len(data):
                break
            raise MetricsError(f"{path}, line {number} is no row of metrics: {line[:80]!r}") from error
        if rows and step <= rows[-1][0]["step"]:
            raise MetricsError(f"{path}, line {number}: step {step} comes after step {rows[-1][0]['step']}; steps must rise")
        rows.append((row, begin))
    return rows


def _check(step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if not _NAME.fullmatch(name):
            raise MetricsError(f"step {step}: metric {name!r} should be called stage/quantity_unit, as train/entropy_nats")
        if not isinstance(value, Real):
            raise MetricsError(f"step {step}: {name} is a {type(value).__name__}, not a number; leave out a metric without a value")
