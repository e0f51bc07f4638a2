"""Servers that stand in for real ones: an HTTP server in this process, and on it a model that says what it is told to, by the APIs of
OpenAI (with vLLM's token ids) and SGLang.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from burnish.config import Sampling
from burnish.engines import Request

CONTEXT = 64
PLAIN = Sampling(max_new_tokens=12)
FAST = {"backoff_s": 0.001, "timeout_s": 30.0}


@dataclass(frozen=True)
class Reply:
    """An answer in full control. cut: bytes of the body that are sent before the connection breaks."""

    body: bytes | dict[str, Any] = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    cut: int | None = None


class StandIn:
    """Answers each call with what `answer(path, body)` gives: JSON data, or a Reply. `calls` are (path, body, headers) as they came."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.answer, self.calls, self.at_once, self.most_at_once = answer, [], 0, 0
        self.lock = threading.Lock()
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version, wbufsize = "HTTP/1.1", -1

            def do_POST(self):
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                with standin.lock:
                    standin.calls.append((self.path, body, dict(self.headers)))
                    standin.at_once += 1
                    standin.most_at_once = max(standin.most_at_once, standin.at_once)
                try:
                    reply = standin.answer(self.path, body)
                finally:
                    with standin.lock:
                        standin.at_once -= 1
                self.give(reply if isinstance(reply, Reply) else Reply(reply))

            do_GET = do_POST

            def give(self, reply):
                if reply.wait_s:
                    standin.closing.wait(reply.wait_s)
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"content-length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: reply.cut])
                if reply.cut is not None:
                    self.close_connection = True

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 64

            def handle_error(self, *_):          # a caller that has gone
                pass

        self.closing = threading.Event()
        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class Model:
    """Says `says(prompt tokens)`, a list of tokens with their log-probs, as far as a server would: to a stop or the most tokens."""

    def __init__(self, tokenizer, says: Callable[[tuple[int, ...]], list[tuple[int, float]]], *, context_tokens: int = 64) -> None:
        self.tokenizer, self.says, self.context_tokens = tokenizer, says, context_tokens

    def write(self, prompt, *, most: int, ends, stop) -> tuple[list[tuple[int, float]], str, Any]:
        out = []
        for pair in self.says(tuple(prompt)):
            out.append(pair)
            text = self.decode([t for t, _ in out])
            if len(out) == most:
                return out, "length", None
            if pair[0] in ends:
                return out, "stop", pair[0]
            if hit := next((s for s in stop if s in text), None):
                return out, "stop", hit
        raise AssertionError("the model has nothing more to say")

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def openai(self, path: str, body: dict[str, Any]) -> Any:
        """/v1/completions with text or token ids, and /v1/chat/completions of one message."""
        chat = path == "/v1/chat/completions"
        assert path in ("/v1/completions", "/v1/chat/completions"), path
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        tokens = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        if len(tokens) + body["max_tokens"] > self.context_tokens:
            told = f"This model's maximum context length is {self.context_tokens} tokens."
            return Reply({"error": {"message": told, "code": 400}}, status=400)
        own = [] if body.get("ignore_eos") else [self.tokenizer.eos_token_id]
        out, finish, hit = self.write(
            tokens, most=body["max_tokens"], ends=[*own, *body.get("stop_token_ids", ())], stop=body.get("stop", ())
        )
        ids = [t for t, _ in out]
        text = self.decode(ids[:-1] if ids[-1] == hit or ids[-1] in own else ids)
        if isinstance(hit, str):
            text = text[: text.index(hit)]
        choice = {"index": 0, "finish_reason": finish, "stop_reason": hit if hit != self.tokenizer.eos_token_id else None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": tokens}
        if "logprobs" in body:
            choice["logprobs"] = {"tokens": [self.decode([t]) for t in ids], "token_logprobs": [lp for _, lp in out]}
        return {"object": "text_completion", "choices": [choice], "usage": {"completion_tokens": len(ids)}}


class SglangModel(Model):
    """With weights: `loaded` are the tensors of the last update, and the version is told in each answer."""

    def __init__(self, *args, **values) -> None:
        super().__init__(*args, **values)
        self.weight_version, self.loaded, self.refuses = "default", {}, None

    def sglang(self, path: str, body: dict[str, Any] | None) -> Any:
        if path == "/health":
            return Reply()
        if path == "/update_weights_from_disk":
            if self.refuses:
                return Reply({"success": False, "message": self.refuses, "num_paused_requests": 0}, status=400)
            self.loaded = {}
            for file in Path(body["model_path"]).glob("*.safetensors"):
                self.loaded |= load_file(file)
            self.weight_version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        assert path == "/generate", path
        params = body["sampling_params"]
        known = {
            "max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "no_stop_trim", "skip_special_tokens",
            "spaces_between_special_tokens", "sampling_seed", "min_new_tokens", "repetition_penalty", "logit_bias",
        }
        assert params.keys() <= known
        ends = [*params["stop_token_ids"], self.tokenizer.eos_token_id]
        out, finish, hit = self.write(body["input_ids"], most=params["max_new_tokens"], ends=ends, stop=params["stop"])
        ids = [t for t, _ in out]
        reason = {"type": "stop", "matched": hit} if finish == "stop" else {"type": "length", "length": len(ids)}
        meta = {"id": "r", "finish_reason": reason, "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids),
                "weight_version": self.weight_version}
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [[lp, t, None] for t, lp in out]
        return {"text": self.decode(ids), "output_ids": ids, "meta_info": meta}


def slow_first(answer: Callable[[str, Any], Any], *, most_s: float = 0.03) -> Callable[[str, Any], Any]:
    """The same answers, the earlier calls later."""
    lock, n = threading.Lock(), [0]

    def waiting(path: str, body: Any) -> Any:
        with lock:
            n[0] += 1
            k = n[0]
        time.sleep(most_s / k)
        return answer(path, body)

    return waiting


def echo(tokenizer):
    """The prompt backwards, then the end; each log-prob tells its place and token."""
    def says(prompt):
        ids = [*prompt[::-1], tokenizer.eos_token_id]
        return [(t, -0.5 - 0.01 * i - 0.001 * t) for i, t in enumerate(ids)]

    return says


def fixed(tokenizer, text, *, end=None):
    """The same text for any prompt, then the end token, and then the text again so that nothing is lacking."""
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id if end is None else end] + [5] * CONTEXT
    return lambda prompt: [(t, -1.0 - 0.125 * i) for i, t in enumerate(ids)]


def ask(tokenizer, *texts, most=12, **values):
    return [Request(tuple(tokenizer(t).input_ids), i, most, **values) for i, t in enumerate(texts)]
