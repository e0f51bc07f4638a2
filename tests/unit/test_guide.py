"""Guides: what they allow is exactly what can be continued, and what comes out obeys."""

import itertools
import json
import random
import re
import string

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from burnish.engines.native.guide import Guide, GuideError, allow_all, token_bytes
from burnish.models.scratch import build_tokenizer

pytest.importorskip("llguidance")

PAD_COLUMNS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["東京", "b\n", 3, None]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-cé]{1,4}$"}, "minItems": 1, "maxItems": 3},
        "at": {
            "type": "object", "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}}, "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "age", "tags", "at"],
    "additionalProperties": False,
}
REGEX = r"(Yes|Nein|für (東京|é)+)[.!]? [0-9]{1,3}(\.[0-9]+)?"
LARK = """
start: expr
expr: term (("+" | "-") term)*
term: NUMBER | "(" expr ")" | "é" term
NUMBER: /[1-9][0-9]{0,3}/
"""
GBNF = """
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= number | "(" expr ")" | "é" term
number ::= [1-9] [0-9]? [0-9]? [0-9]?
"""


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<pad>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([json.dumps(SCHEMA), 'für 東京 "name": "kind", ": [', "Nein. 123 (12+3)-4 Yes!"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: a mark for a space, and bytes for characters without a token."""
    words = ["▁", '{"', '":', '▁"', "name", "▁Yes", "Nein", "für", "12", "東", *string.printable[:95].replace(" ", "")]
    vocab = {t: i for i, t in enumerate(["<pad>", "<end>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


def letters_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(string.printable + "éü東京")


TOKENIZERS = {"bytes": bytes_tokenizer(), "pieces": pieces_tokenizer(), "letters": letters_tokenizer()}
GUIDES = {"json": {"json_schema": SCHEMA}, "regex": {"regex": REGEX}, "lark": {"grammar": LARK}, "gbnf": {"grammar": GBNF}}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def guide_of(tokenizer, **what) -> Guide:
    return Guide(tokenizer, vocab_size=len(tokenizer) + PAD_COLUMNS, end_token_ids=[1], **what)


def allowed(state) -> set[int]:
    out = np.ones(state.guide.vocab_size, dtype=bool)
    state.allow(out)
    return set(np.flatnonzero(out).tolist())


def write(state, text: str) -> None:
    """The text, cut into the longest tokens."""
    left, ids = text.encode(), {b: i for i, b in enumerate(state.guide.token_bytes) if b}
    while left:
        size = next(n for n in range(len(left), 0, -1) if left[:n] in ids)
        state.take(ids[left[:size]])
        left = left[size:]


def obeys(schema: dict, value) -> bool:
    """The keywords that SCHEMA has."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(obeys(schema["properties"][k], v) for k, v in value.items())
        )
    if kind == "array":
        right = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return right and all(obeys(schema["items"], v) for v in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema.get("maxLength", 99) and bool(re.search(schema.get("pattern", ""), value))
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return type(value) in (int, float)


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9é()+-]+", text) is not None and isinstance(eval(text.replace("é", ""), {"__builtins__": {}}), int)


def accepted(name: str, text: str) -> bool:
    if name == "json":
        return obeys(SCHEMA, json.loads(text))
    return re.fullmatch(REGEX, text) is not None if name == "regex" else is_sum(text)


@every_tokenizer
@pytest.mark.parametrize("name", GUIDES)
def test_what_is_allowed_can_be_continued_and_ends_as_a_valid_text(tokenizer, name):
    guide, rng = guide_of(tokenizer, **GUIDES[name]), random.Random(0)
    texts = set()
    for _ in range(30):
        state, tokens = guide.start(), []
        while not state.finished:
            may = sorted(allowed(state))
            assert len(tokens) < 400, tokenizer.decode(tokens)
            for token in rng.sample(may, min(3, len(may))):
                branch = state.copy()
                branch.take(token)
                assert allowed(branch)
            if len(tokens) > 30:                      # towards the end
                may = [t for t in may if t == 1 or re.search(rb'["})\].]', guide.token_bytes[t])] or may
            token = 1 if 1 in may and (len(tokens) > 30 or rng.random() < 0.3) else rng.choice(may)
            state.take(token)
            tokens.append(token)
        text = tokenizer.decode([t for t in tokens if t != 1])
        assert accepted(name, text), text
        assert allowed(state) == {1}
        texts.add(text)
    assert len(texts) > 20


@every_tokenizer
def test_allowed_are_exactly_the_tokens_that_a_text_of_the_language_goes_on_with(tokenizer):
    """A small language, all texts of which are known."""
    texts = [f"{a}{b} {c}".encode() for a, b, c in itertools.product(["Yes", "Ye", "東京", "é"], ["", "!", "12"], ["für", "f", '{"'])]
    guide = guide_of(tokenizer, regex=r'(Yes?|東京|é)(!|12)? (f(ür)?|\{")')
    pieces = guide.token_bytes
    seen, todo = set(), [(guide.start(), b"")]
    while todo:
        state, so_far = todo.pop()
        if so_far in seen:
            continue
        seen.add(so_far)
        may = allowed(state)
        assert may - {1} == {i for i, p in enumerate(pieces) if p and any(t.startswith(so_far + p) for t in texts)}
        assert (1 in may) == (so_far in texts)
        assert state.finished == (may == {1})
        for token in may - {1}:
            branch = state.copy()
            branch.take(token)
            todo.append((branch, so_far + pieces[token]))
    assert seen.issuperset(texts) and len(seen) > 60


@every_tokenizer
def test_the_bytes_of_tokens_are_what_they_decode_to(tokenizer):
    vocab_size = len(tokenizer) + PAD_COLUMNS
    pieces = token_bytes(tokenizer, vocab_size, [1])
    assert len(pieces) == vocab_size and pieces[:2] == [b"", b""] and pieces[-PAD_COLUMNS:] == [b""] * PAD_COLUMNS
    rng, whole = random.Random(1), 0
    for _ in range(1000):
        tokens = rng.sample(range(2, len(tokenizer)), 3)
        text = b"".join(pieces[t] for t in tokens).decode(errors="replace")
        if "\ufffd" not in text:
            whole += 1
            assert tokenizer.decode(tokens) == text
    assert whole > 50
    for text in ("für 東京!", '{"name": 12}'):
        assert b"".join(pieces[t] for t in tokenizer.encode(text, add_special_tokens=False)).decode() == text


def test_a_character_may_be_split_over_tokens():
    guide = guide_of(TOKENIZERS["bytes"], regex="é|ê|東")
    one = {p[0]: i for i, p in enumerate(guide.token_bytes) if len(p) == 1}
    state = guide.start()
    state.take(one[0xC3])
    assert allowed(state) == {one[0xA9], one[0xAA]} and not state.finished
    state.take(one[0xA9])
    assert allowed(state) == {1} and state.finished


def test_special_tokens_and_padding_are_never_allowed():
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens(["<think>"])
    guide = guide_of(tokenizer, regex=r"[\s\S]*")
    may = allowed(guide.start())
    tool, think = tokenizer.convert_tokens_to_ids(["<tool>", "<think>"])
    assert tool not in may and 0 not in may and think in may and 1 in may
    assert max(may) < len(tokenizer) and len(may) > 300
    state = guide.start()
    for never in (tool, 0, len(tokenizer), guide.vocab_size, -1):
        with pytest.raises(GuideError, match="not allowed"):
            state.take(never)
    assert allowed(state) == may


def test_a_grammar_cannot_ask_for_a_special_token_by_its_number():
    state = guide_of(TOKENIZERS["letters"], grammar='start: "a" (<[0]> | "b")').start()
    write(state, "a")
    assert allowed(state) == set(TOKENIZERS["letters"].encode("b"))
    with pytest.raises(GuideError, match="not allowed"):
        state.take(0)


def test_an_end_token_that_is_a_text_ends_and_stands_for_nothing_else():
    tokenizer = TOKENIZERS["letters"]
    a, line = tokenizer.encode("a\n")
    state = Guide(tokenizer, vocab_size=len(tokenizer), end_token_ids=[line, 1], regex=r"\n?a\s?b*").start()
    assert allowed(state) == {a}
    for end in (line, 1):
        with pytest.raises(GuideError, match="not allowed"):
            state.take(end)
    write(state, "a")
    assert {1, line} <= allowed(state)
    state.take(line)
    assert state.finished and allowed(state) == {1, line}
    for token in (line, 1, *tokenizer.encode("b")):
        with pytest.raises(GuideError, match="not allowed"):
            state.take(token)


def test_back_and_copies():
    guide = guide_of(TOKENIZERS["letters"], json_schema=SCHEMA)
    state, text = guide.start(), '{"name": "é", "kind": 3, "age": 7, "tags": ["a"], "at": {"x": -1.5e3}}'
    seen = []
    for letter in text:
        seen.append(allowed(state))
        write(state, letter)
    assert state.finished
    other = state.copy()
    state.take(1)
    state.rollback(1)
    assert state.finished and allowed(state) == {1}
    for places in (1, 7, 20):
        state.rollback(places)
        assert allowed(state) == seen[len(state.tokens)] and not state.finished
    state.rollback(len(state.tokens))
    assert allowed(state) == seen[0] and allowed(other) == {1} and other.finished
    write(state, text)
    assert state.finished
    with pytest.raises(GuideError, match="cannot be taken back"):
        state.rollback(len(text) + 1)


def test_several_rows_at_once_and_a_dead_end_is_told():
    """This alphabet has no b: after the a nothing can come."""
    tokenizer = build_tokenizer("ac")
    short = Guide(tokenizer, vocab_size=6, end_token_ids=[1], regex="ab?").start()
    short.take(2)
    assert short.finished and allowed(short) == {1}
    guide = Guide(tokenizer, vocab_size=6, end_token_ids=[1], regex="ab|c")
    stuck = guide.start()
    assert allowed(stuck) == {2, 3}
    stuck.take(2)
    out = np.eye(3, 6, dtype=bool)
    errors = allow_all([stuck, None, guide.start()], out)
    assert out.tolist() == [[False] * 6, [True] * 6, [False, False, True, True, False, False]]
    assert list(errors) == [0] and "after 'a' no token" in str(errors[0])
    assert not stuck.finished
    stuck.rollback(1)
    assert allowed(stuck) == {2, 3}


def test_blanks_in_json_have_an_end():
    guide = guide_of(TOKENIZERS["letters"], json_schema=SCHEMA)
    state = guide.start()
    write(state, "{\n" + " " * 19)
    assert not allowed(state) & set(TOKENIZERS["letters"].encode(" \n"))
    tight = guide_of(TOKENIZERS["letters"], json_schema={**SCHEMA, "x-guidance": {"whitespace_flexible": False}}).start()
    write(tight, "{")
    assert allowed(tight) == set(TOKENIZERS["letters"].encode('"'))


def test_a_property_has_one_spelling():
    """Its name written with an escape would be another one to the library, and the same to json.loads."""
    state = guide_of(TOKENIZERS["letters"], json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}).start()
    write(state, '{"')
    with pytest.raises(GuideError, match="not allowed"):
        write(state, r"\u0061")


@pytest.mark.parametrize(("what", "told"), [
    ({}, "one of json_schema, regex and grammar; found none"),
    ({"regex": "a", "grammar": 'start: "a"'}, r"found \['regex', 'grammar'\]"),
    ({"regex": "(a"}, r"guide.regex cannot be used: regex parse error:[\s\S]*unclosed group\nregular expressions work without"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": ""}, "guide.regex is a text; found ''"),
    ({"regex": "日本"}, "begins with nothing that the model's tokenizer can write"),
    ({"grammar": "start: word"}, r'unknown name: "word"'),
    ({"grammar": 'begin: "a"'}, "no start rule found\na grammar is in Lark's notation with a rule `start`"),
    ({"grammar": "start: <|tool|>"}, "unknown special token"),
    ({"grammar": "start: <[0]>"}, "begins with nothing"),
    ({"grammar": "root ::= word"}, "Rule 'word' not found"),
    ({"json_schema": {"type": "strng"}}, "Invalid type: strng"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]\na keyword that is not known'),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "minimum"),
    ({"json_schema": {"enum": [float("nan")]}}, "is not JSON"),
    ({"json_schema": ["a"]}, "is a mapping"),
    ({"json_schema": {"type": "object", "propertys": {}}}, "has no keyword propertys; did you mean 'properties'"),
    ({"json_schema": {"properties": {"a": {"anyOf": [{}, {"requird": ["b"]}]}}}}, r"properties\.a\.anyOf\.1\.requird; did you mean 'req"),
    ({"json_schema": {"items": {"nullable": True}}}, "no keyword items.nullable"),
    ({"json_schema": {"type": "string", "x-guidance": {"blanks": 1}}}, "unknown field `blanks`"),
], ids=str)
def test_wrong_constraints_teach(what, told):
    with pytest.raises(GuideError, match=told):
        guide_of(TOKENIZERS["letters"], **what)


def test_wrong_surroundings_teach():
    tokenizer = TOKENIZERS["letters"]
    for end_token_ids in ([], [99999]):
        with pytest.raises(GuideError, match="name one"):
            Guide(tokenizer, vocab_size=len(tokenizer), end_token_ids=end_token_ids, regex="a")
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(GuideError, match=r"decodes with \['WordPiece'\]"):
        Guide(PreTrainedTokenizerFast(tokenizer_object=words), vocab_size=3, end_token_ids=[0], regex="a")
    with pytest.raises(GuideError, match="a object does not tell the bytes"):
        Guide(object(), vocab_size=3, end_token_ids=[0], regex="a")
