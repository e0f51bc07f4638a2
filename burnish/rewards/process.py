"""The parent's side of a worker: starts the child, sends and receives lines without ever blocking on it, kills it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import burnish
from burnish.ref import Ref, RefError
from burnish.rewards.wire import dump_line

CHECK_S = 0.25


class Setting(Protocol):
    """What the pool reads of a config.Reward."""

    fn: Ref
    name: str | None
    weight: float
    timeout_s: float
    isolate: bool


class Died(Exception):
    """The child ended by itself."""


@dataclass(frozen=True, slots=True)
class Start:
    """How each child of a pool is started: the same the first time and after a crash."""

    line: bytes
    cwd: str
    timeout_s: float
    log: Path | None
    rewards: str                   # their paths, for messages

    @classmethod
    def of(cls, rewards: Sequence[Setting], *, timeout_s: float, memory_gib: float | None, log: Path | None) -> Start:
        cwd = os.getcwd()
        description = {
            "rewards": [{"path": r.fn.path, "values": dict(r.fn.values), "timeout_s": r.timeout_s} for r in rewards],
            "sys_path": [entry or cwd for entry in sys.path],
            "argv": sys.argv,
            "pythonpath": os.environ.get("PYTHONPATH"),
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
        }
        paths = ", ".join(r.fn.path for r in rewards)
        try:
            line = dump_line(description)
        except (TypeError, ValueError) as error:
            raise RefError(f"the values of {paths} must be plain JSON to reach a worker ({error}); or set isolate: false") from error
        return cls(line, cwd, timeout_s, log, paths)


class Process:
    """One child. Raises RefError when a reward does not import there."""

    def __init__(self, start: Start) -> None:
        self._log = open(start.log, "ab") if start.log else None
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "burnish.rewards.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
            cwd=start.cwd, env=_environment(), start_new_session=True,
        )
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._to_send, self._received = bytearray(), bytearray()
        try:
            self._wait_until_ready(start)
        except BaseException:
            self.kill()
            raise

    def send(self, line: bytes) -> None:
        """Queue a line; `receive` writes it out as the child takes it."""
        if not self._to_send:
            self._poll.register(self._in, select.POLLOUT)
        self._to_send += line
        self._write()

    def receive(self, timeout_s: float) -> list[Any]:
        """The lines that have arrived, or those that arrive within the time; [] if none. Died when the child ended."""
        ready = dict(self._poll.poll(math.ceil(max(timeout_s, 0.0) * 1000)))
        if self._in in ready:
            self._write()
        if self._out not in ready:
            # A process that it forked may hold the pipe open, so that no end of file comes
            if self._child.poll() is None:
                return []
            if not self._poll.poll(0):
                raise Died(self._how_it_ended())
        try:
            data = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise Died(self._how_it_ended())
        *lines, rest = (bytes(self._received) + data).split(b"\n")
        self._received = bytearray(rest)
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise Died(f"it wrote {lines[0][:60]!r} where burnish's own messages belong") from None

    def kill(self) -> None:
        """Kill the child and every process it started. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone, which macOS calls not permitted
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()
        if self._log:
            self._log.close()

    def _write(self) -> None:
        try:
            sent = os.write(self._in, self._to_send[: 1 << 16])
        except BlockingIOError:
            return
        except BrokenPipeError:
            sent = len(self._to_send)  # the end of file on the other pipe tells the story
        del self._to_send[:sent]
        if not self._to_send:
            self._poll.unregister(self._in)

    def _wait_until_ready(self, start: Start) -> None:
        self.send(start.line)
        deadline = time.monotonic() + start.timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                messages = self.receive(min(left_s, CHECK_S))
            except Died as died:
                raise RefError(f"the worker process ended while it imported {start.rewards}: {died}") from None
            if messages:
                break
            if left_s <= 0:
                raise RefError(f"importing {start.rewards} took longer than {start.timeout_s:g} s in a worker process")
        if "failed" in messages[0]:
            raise RefError(messages[0]["failed"])

    def _how_it_ended(self) -> str:
        try:
            code = self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code >= 0:
            return f"it exited with code {code}"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"


def _environment() -> dict[str, str]:
    """The parent's, with its module path, one thread for numeric libraries (workers are many) and stable hashes."""
    root = str(Path(burnish.__path__[0]).resolve().parent)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([entry or os.getcwd() for entry in sys.path] + [root])
    return environment
