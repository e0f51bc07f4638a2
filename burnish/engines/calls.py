"""JSON calls to a server, side by side, from a thread of their own: limits, retries, and errors without secrets."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import importlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from burnish.engines.base import EngineError

DETAIL_CHARS = 200
Progress = Callable[[int, int], None]


class CallError(Exception):
    """A call that failed for good. `what` tells it in one line, without the key.

    at_server: the server did not answer as it should (gone, busy, silent, nonsense), so another one may; else it refused this call.
    """

    def __init__(self, what: str, *, at_server: bool) -> None:
        super().__init__(what)
        self.what, self.at_server = what, at_server

    @property
    def stop(self) -> str:
        return f"error:{'server' if self.at_server else 'refused'}: {self.what}"


class Calls:
    """A server's address with how it is spoken to.

    key_env: name of the environment variable that holds the key, sent as a bearer token and to this server only. concurrency: calls at
    once. timeout_s: for one try, from its start to the last byte. tries: of a call that meets 429, 5xx or a broken connection; the pause
    begins at backoff_s and doubles, and is what the server's Retry-After says where that is longer; one beyond longest_pause_s ends the
    call. Other 4xx and a timeout are final.

    Runs an event loop in a thread of its own, so it works where the caller has a loop running, as in a notebook.
    """

    def __init__(
        self, base_url: str, *, key_env: str | None = None, concurrency: int = 32, timeout_s: float = 300.0,
        connect_timeout_s: float = 10.0, tries: int = 5, backoff_s: float = 0.5, longest_pause_s: float = 60.0,
    ) -> None:
        self.base_url = _checked_url(base_url)
        for name, value in (("concurrency", concurrency), ("tries", tries), ("timeout_s", timeout_s)):
            if value <= 0:
                raise EngineError(f"{name} is {value}; it must be more than 0")
        self.httpx = _library()
        self.timeout_s, self.tries, self.backoff_s, self.longest_pause_s = timeout_s, tries, backoff_s, longest_pause_s
        self._key = _key(key_env)
        self._at_once = asyncio.Semaphore(concurrency)
        self._client = self.httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=self.httpx.Timeout(timeout_s, connect=min(connect_timeout_s, timeout_s), pool=None),
            limits=self.httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="burnish-calls", daemon=True)
        self._thread.start()

    def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> Any:
        """The JSON of the answer. Raises CallError."""
        return self._wait(self._call("POST", path, body, timeout_s))

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The JSON of the answer, None for an empty one. Raises CallError."""
        return self._wait(self._call("GET", path, None, timeout_s))

    def post_all(self, path: str, bodies: Sequence[Any], progress: Progress | None = None) -> list[Any | CallError]:
        """Answers in the order of the bodies; one that failed is its CallError."""
        if not bodies:
            return []
        done = 0

        async def one(body: Any) -> Any | CallError:
            nonlocal done
            try:
                return await self._call("POST", path, body, None)
            except CallError as error:
                return error
            finally:
                done += 1

        async def together() -> list[Any | CallError]:
            return await asyncio.gather(*map(one, bodies))

        return self._wait(together(), None if progress is None else lambda: progress(done, len(bodies)))

    def close(self) -> None:
        """Calls that run are cancelled. May be called again."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await self._client.aclose()

    def _wait(self, work: Any, report: Callable[[], None] | None = None) -> Any:
        if self._loop.is_closed():
            work.close()
            raise EngineError(f"the engine of {self.base_url} was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while report is not None:
                try:
                    return future.result(0.2)
                except TimeoutError:
                    if future.done():
                        raise
                finally:
                    report()
            return future.result()
        except BaseException:      # an interrupt above all: nothing goes on behind the caller's back
            future.cancel()
            raise

    async def _call(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        for n in range(1, self.tries + 1):
            pause_s = self.backoff_s * 2 ** (n - 1) * random.uniform(0.5, 1.0)
            try:
                async with self._at_once, asyncio.timeout(timeout_s or self.timeout_s):
                    response = await self._client.request(method, self.base_url + path, json=body)
            except (TimeoutError, self.httpx.ReadTimeout, self.httpx.WriteTimeout):
                raise CallError(f"no answer within {timeout_s or self.timeout_s:g} s", at_server=True) from None
            except (self.httpx.TransportError, OSError) as error:
                what = f"{type(error).__name__}: {self._clean(str(error))}"
            else:
                if response.status_code < 300:
                    return self._json(response)
                what = f"HTTP {response.status_code}{self._told(response)}"
                if response.status_code != 429 and response.status_code < 500:
                    raise CallError(what, at_server=False)
                pause_s = max(pause_s, _retry_after_s(response.headers.get("retry-after")))
            if n == self.tries:
                break
            if pause_s > self.longest_pause_s:
                raise CallError(f"{what}; asks for a pause of {pause_s:.0f} s", at_server=True)
            await asyncio.sleep(pause_s)
        raise CallError(f"{what} ({self.tries} tries)" if self.tries > 1 else what, at_server=True)

    def _json(self, response: Any) -> Any:
        if not response.content:
            return None
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise CallError(f"the answer is no JSON: {self._clean(response.text)!r}", at_server=True) from None

    def _told(self, response: Any) -> str:
        """The server's own words. Not where the key was refused: they may repeat a part of it."""
        if response.status_code in (401, 403):
            return ": the key was refused" if self._key else ": wants a key; name its environment variable as key_env"
        try:
            found = response.json()
            error = found.get("error", found)
            text = error.get("message", "") if isinstance(error, dict) else error
        except (ValueError, AttributeError):
            text = response.text
        return f": {self._clean(text)}" if isinstance(text, str) and text.strip() else ""

    def _clean(self, text: str) -> str:
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:DETAIL_CHARS]


def _checked_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError(f"base_url is {base_url.partition('@')[2] or base_url!r}; it is an address as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise EngineError(f"base_url of {parts.hostname} holds more than host and path; give a key by the name of its variable, as key_env")
    return base_url.rstrip("/")


def _key(key_env: str | None) -> str | None:
    if key_env is None:
        return None
    if not re.fullmatch("[A-Z][A-Z0-9_]*", key_env):
        raise EngineError("key_env is the name of an environment variable, in capitals as OPENAI_API_KEY, never the key itself")
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise EngineError(f"the environment variable {key_env}, named by key_env, is not set")
    if not (key.isascii() and key.isprintable()):
        raise EngineError(f"the environment variable {key_env} holds a character that no key has")
    return key


def _library() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("httpx2")
    raise EngineError("engines behind a server need httpx2; pip install 'burnish[remote]'")


def _retry_after_s(value: str | None) -> float:
    """Seconds of a Retry-After header, which gives them or a date; 0 where it gives neither."""
    if value is None:
        return 0.0
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
