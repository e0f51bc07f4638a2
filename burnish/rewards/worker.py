"""The child process that calls rewards: `python -m burnish.rewards.worker`, JSON lines in and out.

In:   one line that describes the start, then {"id", "do": [reward indices], "rollout"} a line.
Out:  {"ready": true} or {"failed": text}; then [id, index] when a call starts and [id, index, score, error, steps] when it ends.
What the rewards print goes to stderr. Imports no torch unless a reward does.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from burnish.ref import Ref, RefError
from burnish.rewards.call import Reward, StopImport, bind, call, describe, enter_worker, fill_in
from burnish.rewards.wire import dump_line, load_rollout

ORPHAN_GRACE_S = 5.0


def main() -> None:
    requests, send = _take_over_pipes()
    start = json.loads(requests.readline())
    _prepare(start)
    try:
        rewards = [(_bind(Ref(r["path"], r["values"])).load(), float(r["timeout_s"])) for r in start["rewards"]]
    except BaseException as error:  # SystemExit of a script that reads its arguments, too
        send({"failed": str(error) if isinstance(error, RefError) else describe(error)})
        os._exit(1)
    send({"ready": True})
    for line in requests:
        request = json.loads(line)
        rollout = load_rollout(request["rollout"])
        for index in request["do"]:
            reward, timeout_s = rewards[index]
            send([request["id"], index])
            _arm(timeout_s + ORPHAN_GRACE_S)
            answer, = call(reward, [rollout], _wait)
            _arm(0)
            send([request["id"], index, answer.score, answer.error, answer.steps])
    os._exit(0)  # threads that a reward left behind must not keep the process


def _take_over_pipes() -> tuple[Any, Callable[[Any], None]]:
    """Keep stdin and stdout for the protocol; rewards find an empty stdin, and a stdout that is stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)

    def send(message: Any) -> None:
        data = dump_line(message)
        while data:
            data = data[os.write(replies, data):]

    return requests, send


def _prepare(start: dict[str, Any]) -> None:
    """Modules and arguments as the parent sees them, and limits on memory and core files."""
    import resource

    enter_worker()
    sys.path[:] = start["sys_path"]
    sys.argv[:] = start["argv"]
    os.environ.pop("PYTHONPATH", None)
    if start["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = start["pythonpath"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if start["memory_bytes"] is not None:
        # Not RLIMIT_AS: libraries reserve address space they never touch
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = start["memory_bytes"] if hard == resource.RLIM_INFINITY else min(hard, start["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _bind(ref: Ref) -> Reward:
    try:
        return bind(ref)
    except StopImport as stop:
        module, _, name = ref.path.rpartition(":")
        scope = _module_scope(stop, module)
        if name in scope:
            return fill_in(ref, scope[name])
        raise RefError(
            f"{ref.path}: the file starts training when it is imported, before {name} is defined. Move {name} above, into a file "
            f"of its own, or put the training code under `if __name__ == '__main__':`"
        ) from None


def _module_scope(stop: StopImport, module: str) -> dict[str, Any]:
    """What the script had defined when its import ended: the names of the frame that ran it."""
    trace = stop.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "<module>" and (trace.tb_frame.f_globals["__name__"] == module or _same_file(code.co_filename, module)):
            return trace.tb_frame.f_globals
        trace = trace.tb_next
    return {}


def _same_file(file: str, module: str) -> bool:
    return module.endswith(".py") and os.path.realpath(file) == os.path.realpath(module)


def _wait(awaitable: Awaitable[Any]) -> Any:
    return _event_loop().run_until_complete(awaitable)


@functools.cache
def _event_loop() -> Any:
    """One loop for all calls, so that a reward may keep a connection. Made at the first async call: asyncio is slow to import."""
    import asyncio

    return asyncio.new_event_loop()


def _arm(seconds: float) -> None:
    """Let the kernel end this process when a call outlives its limit and the parent is not there to do it.

    Works while the call holds the interpreter's lock. Also cancels an alarm that a reward set and forgot.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
