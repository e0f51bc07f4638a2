"""What the vllm engine does without vLLM: weights on their way, and servers that are not what they should be."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from burnish.config import Sampling
from burnish.engines import Request
from burnish.engines.base import EngineError
from burnish.engines.vllm import VllmEngine, server, weights
from burnish.engines.vllm.engine import _seed
from burnish.engines.vllm.link import vllm_settings

pytest_plugins = ("closing",)


@pytest.fixture
def tensors():
    embed = torch.randn(6, 4)
    return {"embed": embed, "norm": torch.ones(4, dtype=torch.bfloat16), "other_norm": torch.ones(4, dtype=torch.bfloat16), "head": embed}


def test_weights_arrive_as_they_were_sent_tied_ones_once(tmp_path, tensors):
    weights.write(tmp_path, 3, tensors.items())
    assert set(json.loads((tmp_path / weights.PAGE).read_text())["tensors"]) == {"embed", "norm", "other_norm"}
    found = weights.read(tmp_path, 3)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_weights_that_are_not_whole_are_not_read(tmp_path, tensors):
    weights.write(tmp_path, 3, tensors.items())
    file, page = tmp_path / weights.WEIGHTS, tmp_path / weights.PAGE
    whole, told = file.read_bytes(), page.read_text()
    with pytest.raises(weights.Damaged, match="holds version 3, not 4"):
        weights.read(tmp_path, 4)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(weights.Damaged, match="checksums of 1 of 3 tensors differ"):
        weights.read(tmp_path, 3)
    file.write_bytes(whole[:-1])
    with pytest.raises(weights.Damaged, match="cannot be read"):
        weights.read(tmp_path, 3)
    file.write_bytes(whole)
    page.write_text(told.replace('"norm"', '"gone"'))
    with pytest.raises(weights.Damaged, match="other tensors"):
        weights.read(tmp_path, 3)


def test_weights_fit_the_model_or_are_refused(tensors):
    shapes = {"embed": [6, 4], "norm": [4], "other_norm": [4]}
    assert weights.fitted(tensors, shapes).keys() == shapes.keys()
    with pytest.raises(weights.Damaged, match="no tensor head"):
        weights.fitted(tensors | {"head": tensors["embed"] + 1}, shapes)
    with pytest.raises(weights.Damaged, match="1 of the model's 4 tensors"):
        weights.fitted(tensors, shapes | {"bias": [4]})
    with pytest.raises(weights.Damaged, match=r"norm has the shape \[4\]; the model's is \[5\]"):
        weights.fitted(tensors, shapes | {"norm": [5]})


def test_options_that_burnish_sets_itself_are_refused():
    given = {"model": "m", "dtype": "auto", "context_tokens": None, "seed": 0}
    assert vllm_settings(**given, options={"max_num_seqs": 8})["max_num_seqs"] == 8
    for name in ("logprobs_mode", "generation_config", "trust_remote_code"):
        with pytest.raises(EngineError, match=name):
            vllm_settings(**given, options={name: "x"})


def test_options_become_flags_of_the_server():
    assert server._flag("enforce_eager", True) == ["--enforce-eager"]
    assert server._flag("enable_prefix_caching", False) == ["--no-enable-prefix-caching"]
    assert server._flag("kv_cache_memory_bytes", 5) == ["--kv-cache-memory-bytes", "5"]
    assert server._flag("compilation_config", {"mode": 0}) == ["--compilation-config", '{"mode": 0}']


def test_a_later_turn_draws_other_numbers_than_an_earlier_one():
    seeds = [_seed(Request((1,) * n, stream, 1)) for n in (1, 2, 3) for stream in (0, 1, 2**64 - 1)]
    assert len(set(seeds)) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_log_is_told_by_its_first_errors_and_its_end():
    process = server.Process([sys.executable, "-c", "raise SystemExit(3)"], {})
    process.popen.wait()
    process.log.write_text("\n".join(
        ["(Worker) ERROR [a.py:1] RuntimeError: head_dim=16", "(Core) ERROR [b.py:2] RuntimeError: head_dim=16",
         "(API) ERROR [c.py:3] x.y.DeadError: see above", *(f"line {n}" for n in range(30))]
    ))
    told = process.told().splitlines()
    assert told[:4] == ["the errors in its log:", "RuntimeError: head_dim=16", "x.y.DeadError: see above", "the end of its log:"]
    assert told[4:] == [f"line {n}" for n in range(10, 30)]
    process.end()
    assert process.last_line() == ""


class Plain:
    """A server that says what it is told to; `hold` keeps completions waiting, and then /health too."""

    def __init__(self, workers, completion=None, *, hold=False):
        self.release, self.forgets = threading.Event(), True
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, value, status=200):
                data = json.dumps(value).encode()
                with contextlib.suppress(OSError):       # the caller has hung up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def do_GET(self):
                if self.path == "/health" and hold:
                    stand_in.release.wait()
                self.answer({"data": [{"id": "policy", "max_model_len": 64}]})

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/completions":
                    if hold:
                        stand_in.release.wait()
                    return self.answer(completion)
                if self.path == "/reset_prefix_cache":
                    return self.answer({"success": stand_in.forgets})
                if workers is None:
                    return self.answer({"detail": "Not Found"}, 404)
                return self.answer({"results": [workers]})

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


ABOUT = {"version": 0, "logprobs_mode": "processed_logprobs", "vocabulary": 60}


def test_a_server_without_burnishs_part_or_with_other_log_probs_is_refused(open_, tokenizer):
    with pytest.raises(EngineError, match=r"HTTP 404: Not Found(?s:.*)the remote engine"):
        VllmEngine.at_url(open_(Plain(None)).url, tokenizer)
    with pytest.raises(EngineError, match="gives raw_logprobs"):
        VllmEngine.at_url(open_(Plain(ABOUT | {"logprobs_mode": "raw_logprobs"})).url, tokenizer)
    with pytest.raises(EngineError, match="reads as http://host:port"):
        VllmEngine.at_url("127.0.0.1:8000", tokenizer)
    with pytest.raises(EngineError, match="is gone"):
        VllmEngine.at_url("http://127.0.0.1:9", tokenizer)


@pytest.mark.parametrize(
    ("choice", "stop", "tokens"),
    [
        ({"token_ids": [5, 6, 1], "finish_reason": "stop"}, "end_token", (5, 6, 1)),
        ({"token_ids": [5, 6, 7], "finish_reason": "length"}, "max_tokens", (5, 6, 7)),
        ({"token_ids": [5, 6], "finish_reason": "length"}, "context", (5, 6)),
        ({"token_ids": [5, 6], "finish_reason": "stop"}, "error:refused: the turn was ended by token 6", ()),
        ({"token_ids": [5], "finish_reason": "abort"}, "cancelled", (5,)),
        ({"token_ids": [5, 6], "finish_reason": "length", "logp": [-1.0, None]}, "error:non_finite_logits", (5,)),
        ({"token_ids": [5, 6], "finish_reason": "length", "logp": [-1.0]}, "error:vllm gave 1 log-probs for 2 tokens", ()),
    ],
)
def test_answers_become_completions(open_, tokenizer, choice, stop, tokens):
    logp = choice.pop("logp", [-0.5] * len(choice["token_ids"]))
    completion = {"choices": [choice | {"logprobs": {"token_logprobs": logp}}]}
    engine = open_(VllmEngine.at_url(open_(Plain(ABOUT, completion)).url, tokenizer))
    (done,) = engine.generate([Request((9,), 1, 3)], Sampling(max_new_tokens=3))
    assert done.stop.startswith(stop) and done.tokens == tokens and len(done.logp_gen) == len(tokens)


def test_a_load_that_the_server_does_not_confirm_is_an_error(open_, tokenizer, tensors, tmp_path):
    stand_in = open_(Plain(ABOUT | {"error": None}))
    engine = open_(VllmEngine.at_url(stand_in.url, tokenizer, weights_dir=tmp_path))
    with pytest.raises(EngineError, match=r"of version \[0\], not 5"):
        engine.load(5, tensors.items())
    stand_in.forgets = False
    with pytest.raises(EngineError, match="did not forget the prefixes"):
        engine.load(5, tensors.items())
    assert engine.version == 0 and list(tmp_path.iterdir()) == []


def test_weights_lie_in_shared_memory_where_it_has_room(monkeypatch):
    monkeypatch.setattr(server.os, "access", lambda *_: True)
    monkeypatch.setattr(server.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    assert server._place_for(50 << 20) == "/dev/shm"
    assert server._place_for(60 << 20) is None


def test_weights_that_cannot_be_written_and_a_closed_engine_are_told(open_, tokenizer, tensors, monkeypatch):
    engine = open_(VllmEngine.at_url(open_(Plain(ABOUT)).url, tokenizer))

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(server.wire, "write", full)
    with pytest.raises(EngineError, match=r"No space left(?s:.*)give weights_dir another folder"):
        engine.load(1, tensors.items())
    engine.close()
    for call in (lambda: engine.load(1, tensors.items()), lambda: engine.generate([], Sampling())):
        with pytest.raises(EngineError, match="was closed"):
            call()


def test_a_server_that_does_not_answer_any_more_ends_the_call(open_, tokenizer, monkeypatch):
    monkeypatch.setattr(server, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(server, "HEALTH_EVERY_S", 0.1)
    engine = open_(VllmEngine.at_url(open_(Plain(ABOUT, hold=True)).url, tokenizer))
    start_s = time.monotonic()
    with pytest.raises(EngineError, match="has not answered /health 4 times"):
        engine.generate([Request((9,), 1, 3)], Sampling(max_new_tokens=3))
    assert time.monotonic() - start_s < 5


def test_an_interrupt_leaves_nothing_running(open_, tokenizer):
    engine = open_(VllmEngine.at_url(open_(Plain(ABOUT, hold=True)).url, tokenizer))
    advance, calls = engine.link.advance, []

    def interrupted():
        calls.append(len(engine.link.running))
        raise KeyboardInterrupt

    engine.link.advance = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request((9,), n, 3) for n in range(3)], Sampling(max_new_tokens=3))
    engine.link.advance = advance
    assert calls == [3] and engine.link.running == {} and engine.asked == {}
