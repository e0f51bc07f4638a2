"""Engines behind a server: calls that fail in every way, OpenAI's API, SGLang's."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from standin import CONTEXT, FAST, PLAIN, Model, Reply, SglangModel, StandIn, ask, echo

from burnish.config import EvalSampling, Sampling
from burnish.engines import Request
from burnish.engines.base import EngineError
from burnish.engines.calls import CallError, Calls, _retry_after_s
from burnish.engines.remote import EXTRAS, RemoteEngine
from burnish.engines.sglang import SglangEngine

pytest.importorskip("httpx2")
pytest_plugins = ("closing",)

KEY = "sk-very-secret-0123456789"
BUSY, BROKEN = Reply({"error": {"message": "slow down"}}, status=429), Reply(b"oops", status=503)
HALF = Reply({"fine": "x" * 100}, cut=20)


def calls_to(open_, answer, **values):
    server = open_(StandIn(answer))
    return server, open_(Calls(server.url, **{**FAST, **values}))


def in_turn(*replies):
    left = list(replies)
    return lambda path, body: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("fault", [BUSY, BROKEN, HALF, Reply(b"", status=500)], ids=["429", "503", "half", "500"])
def test_what_may_pass_is_tried_again(open_, fault):
    server, calls = calls_to(open_, in_turn(fault, fault, {"fine": 1}))
    assert calls.post("/x", {}) == {"fine": 1}
    assert len(server.calls) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 302])
def test_what_was_refused_is_not_tried_again(open_, status):
    server, calls = calls_to(open_, lambda *_: Reply({"error": {"message": "bad thing"}}, status=status))
    with pytest.raises(CallError, match=f"HTTP {status}") as caught:
        calls.post("/x", {})
    assert not caught.value.at_server and caught.value.stop.startswith("error:refused")
    assert ("bad thing" in str(caught.value)) == (status not in (401, 403))
    assert len(server.calls) == 1


@pytest.mark.parametrize(("fault", "told"), [(BUSY, "HTTP 429: slow down"), (BROKEN, "HTTP 503: oops"), (HALF, "RemoteProtocolError")])
def test_tries_have_an_end(open_, fault, told):
    server, calls = calls_to(open_, lambda *_: fault, tries=3)
    with pytest.raises(CallError, match=told) as caught:
        calls.post("/x", {})
    assert caught.value.at_server and "3 tries" in caught.value.stop
    assert len(server.calls) == 3


def test_a_server_that_is_not_there(open_):
    gone = StandIn(lambda *_: {})
    gone.close()
    calls = open_(Calls(gone.url, tries=2, backoff_s=0.001))
    with pytest.raises(CallError, match="ConnectError"):
        calls.post("/x", {})


def test_a_silent_server_is_left_after_the_timeout_and_not_asked_again(open_):
    server, calls = calls_to(open_, lambda *_: Reply({}, wait_s=30), timeout_s=0.1)
    started = time.monotonic()
    with pytest.raises(CallError, match=r"no answer within 0.1 s"):
        calls.post("/x", {})
    assert time.monotonic() - started < 2 and len(server.calls) <= 1


def test_retry_after_is_kept_and_a_long_one_ends_the_call(open_):
    _, calls = calls_to(open_, in_turn(Reply(status=429, headers={"retry-after": "0.2"}), {"fine": 1}))
    started = time.monotonic()
    assert calls.post("/x", {}) == {"fine": 1}
    assert time.monotonic() - started >= 0.2
    server, calls = calls_to(open_, lambda *_: Reply(status=429, headers={"retry-after": "3600"}))
    with pytest.raises(CallError, match="pause of 3600 s"):
        calls.post("/x", {})
    assert len(server.calls) == 1
    soon = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    assert 25 < _retry_after_s(soon) <= 30
    assert [_retry_after_s(v) for v in (None, "soon", "-3", "2")] == [0.0, 0.0, 0.0, 2.0]


def test_no_more_calls_at_once_than_allowed_and_one_failure_stays_alone(open_):
    def answer(path, body):
        time.sleep(0.005)
        return Reply(status=400) if body == 3 else {"got": body}

    server, calls = calls_to(open_, answer, concurrency=4)
    got = calls.post_all("/x", list(range(20)))
    assert 1 < server.most_at_once <= 4
    assert isinstance(got[3], CallError)
    assert [g for i, g in enumerate(got) if i != 3] == [{"got": i} for i in range(20) if i != 3]


def test_waiting_for_a_turn_is_no_silence_of_the_server(open_):
    _, calls = calls_to(open_, lambda *_: Reply({}, wait_s=0.1), concurrency=1, timeout_s=0.5)
    assert calls.post_all("/x", [0] * 6) == [{}] * 6


def test_an_answer_that_is_no_json(open_):
    _, calls = calls_to(open_, lambda *_: Reply(b"<html>a proxy's page</html>"))
    with pytest.raises(CallError, match="no JSON") as caught:
        calls.post("/x", {})
    assert caught.value.at_server


def test_the_key_goes_to_the_server_and_nowhere_else(open_, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    for status in (400, 401, 500):
        server, calls = calls_to(open_, lambda *_, s=status: Reply({"error": {"message": f"key {KEY} is bad"}}, status=s),
                                 key_env="SOME_KEY", tries=2)
        with pytest.raises(CallError) as caught:
            calls.post("/x", {})
        assert server.calls[0][2]["Authorization"] == f"Bearer {KEY}"
        assert "secret" not in str(caught.value) + repr(caught.value) + repr(calls) + repr(calls._client)
    _, calls = calls_to(open_, lambda *_: Reply(KEY.encode()), key_env="SOME_KEY")
    with pytest.raises(CallError) as caught:
        calls.post("/x", {})
    assert "secret" not in str(caught.value)


def test_addresses_and_keys_that_are_wrong_are_told_without_showing_them(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("ODD_KEY", KEY + "ü")
    for url, values, told in [
        (f"http://me:{KEY}@host/v1", {}, "key_env"), (f"https://host/v1?key={KEY}", {}, "key_env"), ("host:8000", {}, "http://"),
        ("http://host", {"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"), ("http://host", {"key_env": KEY}, "never the key itself"),
        ("http://host", {"key_env": "secret0123"}, "never the key itself"), ("http://host", {"key_env": "ODD_KEY"}, "ODD_KEY holds"),
        ("http://host", {"tries": 0}, "tries is 0"),
    ]:
        with pytest.raises(EngineError, match=told) as caught:
            Calls(url, **values)
        assert "secret" not in str(caught.value)


def test_closing_ends_what_runs_and_nothing_can_be_asked_afterwards(open_):
    server, calls = calls_to(open_, lambda *_: Reply({}, wait_s=30))
    errors = []

    def asking():
        try:
            calls.post("/x", {})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=asking)
    thread.start()
    while not server.calls:
        time.sleep(0.005)
    calls.close()
    thread.join(2)
    assert not thread.is_alive() and len(errors) == 1
    with pytest.raises(EngineError, match="closed"):
        calls.post("/x", {})


# remote

def remote(open_, tokenizer, answer, **values):
    server = open_(StandIn(answer))
    return server, open_(RemoteEngine(server.url + "/v1", model="m", **{"tokenizer": tokenizer, **FAST, **values}))


SHAPED = Sampling(
    temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=("\n",), repetition_penalty=1.2, logit_bias={"a": 2.0, 7: -3.0},
)


def test_what_a_remote_server_is_sent(open_, tokenizer):
    server, engine = remote(
        open_, tokenizer, Model(tokenizer, echo(tokenizer)).openai, knows=EXTRAS, send_seed=True, body={"user": "me", "top_p": None}
    )
    engine.generate([Request(tuple(tokenizer("12").input_ids), 2**40 + 5, 9)], SHAPED)
    path, body, _ = server.calls[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "m", "prompt": "12", "max_tokens": 9, "temperature": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["\n"],
        "repetition_penalty": 1.2, "logit_bias": {str(tokenizer.get_vocab()["a"]): 2.0, "7": -3.0},
        "stop_token_ids": [tokenizer.eos_token_id], "ignore_eos": True, "seed": 5, "user": "me",
    }


def test_text_goes_out_and_comes_back_where_there_are_no_ids(open_, tokenizer):
    for chat in (False, True):
        server, engine = remote(open_, tokenizer, Model(tokenizer, echo(tokenizer)).openai, chat=chat)
        assert not engine.abilities.token_ids and not engine.abilities.logprobs
        ended, cut = engine.generate(
            [*ask(tokenizer, "12+3"), *ask(tokenizer, "abcdef", most=3)], PLAIN
        )
        assert (ended.text, ended.stop, ended.logp_gen) == ("3+21", "end_token", ())
        assert ended.tokens == (*tokenizer("3+21").input_ids, tokenizer.eos_token_id)
        assert (cut.text, cut.stop, cut.tokens) == ("fed", "max_tokens", tuple(tokenizer("fed").input_ids))
        assert {path for path, *_ in server.calls} == {"/v1/chat/completions" if chat else "/v1/completions"}


@pytest.mark.parametrize(
    ("choice", "usage", "stop", "text", "tokens"),
    [
        ({"text": "ab", "finish_reason": "stop"}, None, "end_token", "ab", 3),
        ({"text": "ab", "finish_reason": "stop", "stop_reason": "\n"}, None, "stop_string", "ab", 3),
        ({"text": "ab\ncd", "finish_reason": "length"}, None, "stop_string", "ab", 3),
        ({"text": "ab", "finish_reason": "length"}, {"completion_tokens": 12}, "max_tokens", "ab", 2),
        ({"text": "ab", "finish_reason": "length"}, {"completion_tokens": 2}, "context", "ab", 2),
        ({"text": "ab", "finish_reason": "length"}, None, "max_tokens", "ab", 2),
        ({"text": "", "finish_reason": "stop"}, None, "end_token", "", 1),
    ],
)
def test_how_a_remote_text_ended(open_, tokenizer, choice, usage, stop, text, tokens):
    stops = ("\n",) if stop == "stop_string" else ()
    _, engine = remote(open_, tokenizer, lambda *_: {"choices": [choice], "usage": usage})
    (done,) = engine.generate(ask(tokenizer, "1"), Sampling(stop=stops, max_new_tokens=12))
    assert (done.stop, done.text, len(done.tokens), done.logp_gen) == (stop, text, tokens, ())


def test_stop_or_end_is_not_guessed_as_the_end_where_the_server_does_not_tell(open_, tokenizer):
    _, engine = remote(open_, tokenizer, lambda *_: {"choices": [{"text": "ab", "finish_reason": "stop"}]})
    one, two = (engine.generate(ask(tokenizer, "1"), Sampling(stop=s, max_new_tokens=12))[0] for s in (("\n",), ("\n", ".")))
    assert (one.stop, one.text, len(one.tokens)) == ("stop_string", "ab", 3)
    assert (two.stop, two.text, len(two.tokens)) == ("stop_string", "ab", 2)


ODD = {
    "a list": [], "nothing": {}, "choices is a text": {"choices": "x"}, "no choices": {"choices": []},
    "two choices": {"choices": [{"text": "a", "finish_reason": "stop"}] * 2}, "a choice is a number": {"choices": [3]},
    "no finish_reason": {"choices": [{"text": "a"}]}, "no text": {"choices": [{"finish_reason": "stop"}]},
    "text is a number": {"choices": [{"text": 3, "finish_reason": "stop"}]}, "empty": Reply(b""),
    "an error with 200": {"error": {"message": "out of memory"}},
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_an_odd_answer_is_an_error_of_its_request_and_the_others_go_on(open_, tokenizer, answer):
    model = Model(tokenizer, echo(tokenizer))
    _, engine = remote(open_, tokenizer, lambda p, b: answer if b["prompt"] == "2" else model.openai(p, b))
    done = engine.generate(ask(tokenizer, "11", "2", "33"), PLAIN)
    assert done[1].stop.startswith("error:server") and (done[1].tokens, done[1].logp_gen) == ((), ())
    assert [done[0].text, done[2].text] == ["11", "33"]


def test_a_filtered_answer_and_a_text_beyond_the_vocabulary_are_errors(open_, tokenizer):
    for choice, told in (
        ({"text": "a", "finish_reason": "content_filter"}, "content_filter"), ({"text": "ü", "finish_reason": "stop"}, "tokenizer"),
    ):
        _, engine = remote(open_, tokenizer, lambda *_, c=choice: {"choices": [c]})
        (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
        assert done.stop.startswith("error:refused") and told in done.stop and done.tokens == ()


def by_ids(**changes):
    """An answer with token ids for the prompt "1", with changes to its choice."""
    def answer(path, body):
        choice = {
            "text": "ab", "finish_reason": "length", "token_ids": [5, 6], "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
        }
        return {"choices": [{k: v for k, v in (choice | changes).items() if v != "gone"}]}

    return answer


IDS = {"gives_token_ids": True, "logprobs": "as_sampled"}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": "gone"}, {"token_ids": None}, {"token_ids": []}, {"token_ids": [5, "6"]}, {"token_ids": [5, -1]},
        {"token_ids": [5] * 13}, {"token_ids": [5, True]}, {"token_ids": [5, 2**40]}, {"prompt_token_ids": [9, 9]},
    ],
)
def test_token_ids_that_cannot_be_right_are_an_error(open_, tokenizer, changes):
    _, engine = remote(open_, tokenizer, by_ids(**changes), **IDS)
    (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
    assert done.stop.startswith("error:server") and (done.tokens, done.logp_gen) == ((), ())


@pytest.mark.parametrize(
    "told",
    [
        "gone", None, {}, {"token_logprobs": None}, {"token_logprobs": [-1.0]}, {"token_logprobs": [-1.0, None]},
        {"token_logprobs": [-1.0, -9999.0]}, {"token_logprobs": [-1.0, 0.5]}, {"token_logprobs": [-1.0, "x"]},
    ],
)
def test_log_probs_that_are_missing_stay_missing(open_, tokenizer, told):
    _, engine = remote(open_, tokenizer, by_ids(logprobs=told), **IDS)
    for sampling in (PLAIN, EvalSampling(max_new_tokens=12)):
        (done,) = engine.generate(ask(tokenizer, "1"), sampling)
        assert (done.tokens, done.logp_gen) == ((5, 6), ())


def test_raw_log_probs_fit_plain_draws_only(open_, tokenizer):
    _, engine = remote(open_, tokenizer, by_ids(), gives_token_ids=True, logprobs="raw", knows=EXTRAS)
    assert engine.generate(ask(tokenizer, "1"), PLAIN)[0].logp_gen == (-1.0, -2.0)
    shapes = {"temperature": 0.7, "top_p": 0.9, "top_k": 2, "min_p": 0.1, "logit_bias": {5: 1.0}, "repetition_penalty": 2.0}
    for changed in (Sampling(**{name: value}) for name, value in shapes.items()):
        with pytest.raises(EngineError, match="does not know"):
            engine.check(changed)


def test_a_turn_that_the_server_ended_by_a_token_of_its_own_is_refused(open_, tokenizer):
    _, engine = remote(open_, tokenizer, by_ids(finish_reason="stop"), **IDS)
    (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
    assert done.stop.startswith("error:refused") and "token 6" in done.stop and "sampling.end_tokens" in done.stop


def test_tokens_beyond_the_stop_are_cut_with_their_log_probs(open_, tokenizer):
    end = tokenizer.eos_token_id
    _, engine = remote(open_, tokenizer, by_ids(token_ids=[5, end, 6], logprobs={"token_logprobs": [-1.0, -2.0, -3.0]}), **IDS)
    (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
    assert (done.tokens, done.logp_gen, done.stop) == ((5, end), (-1.0, -2.0), "end_token")


def test_a_prompt_beyond_the_servers_own_context_is_told_as_by_every_engine(open_, tokenizer):
    _, engine = remote(open_, tokenizer, Model(tokenizer, echo(tokenizer), context_tokens=20).openai)
    assert engine.generate(ask(tokenizer, "1" * 30), PLAIN)[0].stop == "error:prompt_too_long"


def test_a_judge_is_asked_by_messages_and_needs_no_tokenizer(open_, tokenizer):
    server, judge = remote(open_, None, Model(tokenizer, echo(tokenizer)).openai, max_tokens_name="max_completion_tokens",
                           body={"max_tokens": 50})
    talks = [({"role": "system", "content": "judge"}, {"role": "user", "content": t}) for t in ("12", "345")]
    done = judge.chat(talks, EvalSampling(max_new_tokens=20))
    assert [(c.text, c.stop, c.tokens, c.logp_gen) for c in done] == [("21", "end_token", (), ()), ("543", "end_token", (), ())]
    bodies = [body for _, body, _ in server.calls]
    assert {b["max_completion_tokens"] for b in bodies} == {20} and {b["temperature"] for b in bodies} == {0.0}
    assert sorted((tuple(b["messages"][1].items()) for b in bodies), key=str) == sorted((tuple(t[1].items()) for t in talks), key=str)
    with pytest.raises(EngineError, match="chat"):
        judge.generate(ask(tokenizer, "1"), PLAIN)


def test_a_chat_answer_without_content_is_an_error(open_):
    for message in ({"role": "assistant", "content": None}, {"content": [{"type": "text"}]}, None):
        _, judge = remote(open_, None, lambda *_, m=message: {"choices": [{"message": m, "finish_reason": "stop"}]})
        (done,) = judge.chat([[{"role": "user", "content": "x"}]], PLAIN)
        assert done.stop.startswith("error:server")


def test_a_server_that_dies_midway_fails_what_it_did_not_answer(open_, tokenizer):
    model = Model(tokenizer, echo(tokenizer))
    server, engine = remote(open_, tokenizer, lambda p, b: model.openai(p, b) if len(server.calls) <= 3 else HALF, concurrency=1, tries=1)
    done = engine.generate(ask(tokenizer, "11", "22", "33", "44", "55"), PLAIN)
    assert [c.text for c in done[:3]] == ["11", "22", "33"]
    assert all(c.stop.startswith("error:server: RemoteProtocolError") and c.tokens == () for c in done[3:])


def test_progress_counts_requests_that_no_server_is_asked_about(open_, tokenizer):
    _, engine = remote(open_, tokenizer, Model(tokenizer, echo(tokenizer)).openai)
    told = []
    engine.generate([*ask(tokenizer, "1", "2"), Request((), 0, 9)], PLAIN, progress=lambda *n: told.append(n))
    assert told[-1] == (3, 3) and {total for _, total in told} == {3}


def test_higher_priorities_are_sent_first(open_, tokenizer):
    server, engine = remote(open_, tokenizer, Model(tokenizer, echo(tokenizer)).openai, concurrency=1)
    asked = [Request(tuple(tokenizer(t).input_ids), 0, 9, priority=p) for t, p in (("1", 0.0), ("2", 5.0), ("3", 1.0))]
    assert [c.text for c in engine.generate(asked, PLAIN)] == ["1", "2", "3"]
    assert [body["prompt"] for _, body, _ in server.calls] == ["2", "3", "1"]


def test_what_a_remote_engine_cannot_be_is_refused_at_once(tokenizer):
    for values, told in [
        ({"logprobs": "raw"}, "gives_token_ids"), ({"gives_token_ids": True, "chat": True}, "chat"), ({"knows": ("guide",)}, "guide"),
        ({"gives_token_ids": True, "logprobs": "yes"}, "as_sampled"),
    ]:
        with pytest.raises(EngineError, match=told):
            RemoteEngine("http://127.0.0.1:9", model="m", tokenizer=tokenizer, **values)


def test_a_remote_engine_takes_no_weights(open_, tokenizer):
    _, engine = remote(open_, tokenizer, lambda *_: {}, version=3)
    engine.load(3)
    for args in ((4,), (3, [("w", torch.ones(1))])):
        with pytest.raises(EngineError, match="version 3"):
            engine.load(*args)
    assert not engine.abilities.publish


# sglang

def sglang(open_, tokenizer, says=None, answer=None, **values):
    model = SglangModel(tokenizer, says or echo(tokenizer))
    server = open_(StandIn(answer or model.sglang))
    return model, server, open_(SglangEngine(server.url, tokenizer, **{"context_tokens": CONTEXT, **FAST, **values}))


@pytest.mark.parametrize(("file_bytes", "files"), [(64, 3), (2**30, 1)])
def test_sglang_gets_the_weights_whole_and_old_folders_go(open_, tokenizer, tmp_path, monkeypatch, file_bytes, files):
    monkeypatch.setattr("burnish.engines.sglang.FILE_BYTES", file_bytes)
    tied = torch.arange(20.0)
    column = torch.arange(6.0).view(2, 3).t()
    weights = {"embed": tied, "head": tied, "half": tied[3:9].to(torch.bfloat16), "column": column, "one": tied[:2]}
    model, server, engine = sglang(open_, tokenizer, folder=tmp_path)
    for version in (1, 2):
        engine.load(version, ((name, w + version) if name == "one" else (name, w) for name, w in weights.items()))
        assert model.loaded.keys() == weights.keys() and model.weight_version == str(version)
        for name, w in weights.items():
            assert torch.equal(model.loaded[name], w + version if name == "one" else w)
    assert [p.name for p in tmp_path.iterdir()] == ["version-2"]
    assert len(list((tmp_path / "version-2").iterdir())) == files
    assert [body["flush_cache"] for path, body, _ in server.calls if path == "/update_weights_from_disk"] == [True, True]


def test_weights_that_sglang_did_not_take_leave_the_version_as_it_was(open_, tokenizer, tmp_path):
    model, server, engine = sglang(open_, tokenizer, folder=tmp_path, tries=1)
    model.refuses = "Failed to load: size mismatch"
    with pytest.raises(EngineError, match=r"version 4.*size mismatch"):
        engine.load(4, [("w", torch.ones(2))])
    assert engine.version == 0 and engine.generate(ask(tokenizer, "1"), PLAIN)[0].version == 0
    server.answer = lambda p, b: {"success": False, "message": "no"}
    with pytest.raises(EngineError, match="no"):
        engine.load(4, [("w", torch.ones(2))])
    with pytest.raises(EngineError, match="without weights"):
        engine.load(4)
    with pytest.raises(EngineError, match="empty"):
        engine.load(4, [])
    assert engine.version == 0
    _, _, no_folder = sglang(open_, tokenizer)
    assert not no_folder.abilities.publish
    with pytest.raises(EngineError, match="folder"):
        no_folder.load(1, [("w", torch.ones(2))])


def test_a_restarted_sglang_server_is_noticed(open_, tokenizer, tmp_path):
    model, _, engine = sglang(open_, tokenizer, folder=tmp_path)
    engine.load(3, [("w", torch.ones(2))])
    model.weight_version = "default"
    (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
    assert done.stop.startswith("error:server") and "'default', not '3'" in done.stop and done.tokens == ()
    engine.load(4, [("w", torch.ones(2))])
    assert engine.generate(ask(tokenizer, "1"), PLAIN)[0].version == 4


def test_sglang_without_log_probs_takes_filters(open_, tokenizer):
    _, server, engine = sglang(open_, tokenizer, logprobs=False, send_seed=True)
    sampling = Sampling(
        top_k=5, top_p=0.5, min_p=0.1, temperature=0.5, stop=("\n",), end_tokens=("<end>", ";"), logit_bias={"a": 2.0, 7: -3.0}
    )
    (done,) = engine.generate([Request(tuple(tokenizer("12").input_ids), 2**40 + 5, 9)], sampling)
    assert (done.text, done.logp_gen, engine.abilities.logprobs) == ("21", (), False)
    body = server.calls[0][1]
    assert body["input_ids"] == tokenizer("12").input_ids and body["return_logprob"] is False
    assert body["sampling_params"] == {
        "max_new_tokens": 9, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "stop": ["\n"],
        "stop_token_ids": [tokenizer.eos_token_id, tokenizer.get_vocab()[";"]], "no_stop_trim": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "sampling_seed": 5,
        "logit_bias": {str(tokenizer.get_vocab()["a"]): 2.0, "7": -3.0},
    }


def test_all_tokens_is_minus_one_to_sglang_and_higher_priorities_are_sent_first(open_, tokenizer):
    _, server, engine = sglang(open_, tokenizer, concurrency=1)
    engine.generate([*ask(tokenizer, "1"), *ask(tokenizer, "2", priority=1.0)], PLAIN)
    bodies = [body for _, body, _ in server.calls]
    assert [body["sampling_params"]["top_k"] for body in bodies] == [-1, -1]
    assert [tokenizer.decode(body["input_ids"]) for body in bodies] == ["2", "1"]


def meta(**changes):
    whole = {"finish_reason": {"type": "length", "length": 2}, "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
             "weight_version": "default"}
    return {"text": "ab", "output_ids": [5, 6], "meta_info": {k: v for k, v in (whole | changes).items() if v != "gone"}}


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        ([], "error:server"), ({}, "error:server"), ({"meta_info": 3}, "error:server"), (meta(finish_reason=None), "error:server"),
        (meta(finish_reason={"type": "abort", "message": "out of memory"}), "error:server: aborted: out of memory"),
        (meta(finish_reason={"type": "abort", "message": "bad", "status_code": 400}), "error:refused"),
        (meta(finish_reason={"type": "stop", "matched": "NaN happened"}), "error:non_finite_logits"),
        (meta(finish_reason={"type": "stop", "matched": 6}), "error:refused"), (meta(output_token_logprobs=[3]), "error:server"),
        (meta(output_token_logprobs=[]), "error:server"), (meta(output_token_logprobs=[[-1.0, 5, None]] * 13), "error:server"),
    ],
)
def test_odd_answers_of_sglang(open_, tokenizer, answer, stop):
    _, _, engine = sglang(open_, tokenizer, answer=lambda *_: answer)
    (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
    assert done.stop.startswith(stop) and (done.tokens, done.logp_gen) == ((), ())


@pytest.mark.parametrize("rows", ["gone", [[None, 5, None], [-2.0, 6, None]]])
def test_log_probs_that_sglang_leaves_out_stay_missing(open_, tokenizer, rows):
    _, _, engine = sglang(open_, tokenizer, answer=lambda *_: meta(output_token_logprobs=rows))
    (done,) = engine.generate(ask(tokenizer, "1"), PLAIN)
    assert (done.tokens, done.logp_gen) == ((5, 6), ())


def test_sglang_is_checked_at_start(open_, tokenizer):
    _, server, engine = sglang(open_, tokenizer, tries=1)
    engine.check(PLAIN)
    with pytest.raises(EngineError, match="top_k"):
        engine.check(Sampling(top_k=3))
    server.answer = lambda *_: Reply(status=503)
    with pytest.raises(EngineError, match="not healthy: HTTP 503"):
        engine.check(PLAIN)
