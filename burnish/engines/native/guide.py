"""Guided decoding: which tokens may come next, so that the text obeys a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from burnish.models.records import nearest

BLANKS = r"[ \t\n\r]{1,20}"
"""Between the parts of JSON: any usual layout, but no blanks without end."""

ESCAPES = '"\\bfnrt'
"""In strings of JSON. With \\u a name of a property could be written in another way, past what the schema says of it."""

_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "not", "if", "then", "else", "contains",
                      "propertyNames", "unevaluatedItems", "unevaluatedProperties", "additionalItems"})
_KEYWORDS = _SCHEMAS_BY_NAME | _SCHEMAS | {
    "type", "enum", "const", "required", "minProperties", "maxProperties", "dependentRequired", "minItems", "maxItems", "uniqueItems",
    "minContains", "maxContains", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "$ref", "$schema", "$id", "id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary", "$comment",
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator",
    "contentEncoding", "contentMediaType", "contentSchema",
}

_FREE = '%llguidance {"no_forcing": true}\n'    # else the library allows one way only of cutting a forced text into tokens
_JOINED = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


class GuideError(ValueError):
    """A guide that cannot be used, a token that it does not allow, or a text that no token of the vocabulary continues."""


class Guide:
    """A compiled constraint on the text of a completion, from its first token to its end token. Make it once, `start` it per sequence.

    vocab_size: columns of the model's logits; ids beyond the tokenizer are never allowed. Exactly one of
    json_schema: what to write as JSON; an object's properties come in the schema's order. A keyword that cannot be enforced is refused.
    regex: of the whole text, as for re.fullmatch, without look-around and back references.
    grammar: Lark's notation with a rule `start`, or GBNF (::=) with a rule `root`.
    Any way of cutting a text into tokens is allowed. Special tokens never are, but for the end tokens.
    Raises GuideError, with what would work, for a tokenizer or a constraint that cannot be used.
    """

    def __init__(
        self, tokenizer: Any, *, vocab_size: int, end_token_ids: Sequence[int], json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None, grammar: str | None = None,
    ) -> None:
        given = {name: x for name, x in (("json_schema", json_schema), ("regex", regex), ("grammar", grammar)) if x is not None}
        if len(given) != 1:
            raise GuideError(f"a guide is one of json_schema, regex and grammar; found {list(given) or 'none of them'}")
        if not end_token_ids or not all(0 <= i < vocab_size for i in end_token_ids):
            raise GuideError(f"a guided text ends with an end token below {vocab_size}; end_tokens are {list(end_token_ids)}: name one")
        ((kind, value),) = given.items()
        self.kind, self.vocab_size, self.end_token_ids = kind, vocab_size, frozenset(end_token_ids)
        self.token_bytes = token_bytes(tokenizer, vocab_size, self.end_token_ids)
        is_text = [bool(b) for b in self.token_bytes]
        self.text_bits = np.packbits([*is_text, False], bitorder="little")
        self.end_bits = np.packbits([False] * vocab_size + [True], bitorder="little")     # the place behind the vocabulary
        self._matcher = _compile(self.token_bytes, kind, value)
        self._start_bits: np.ndarray | None = None
        try:
            self._start_bits = self.start()._bits()
        except GuideError as error:
            raise GuideError(f"guide.{kind} begins with nothing that the model's tokenizer can write; {error}") from None

    def start(self) -> GuideState:
        return GuideState(self, self._matcher.deep_copy(), self._start_bits, [])


class GuideState:
    """How far one sequence is. Made by Guide.start."""

    __slots__ = ("_cached_bits", "_matcher", "guide", "tokens")

    def __init__(self, guide: Guide, matcher: Any, bits: np.ndarray | None, tokens: list[int]) -> None:
        self.guide, self.tokens = guide, tokens
        self._matcher, self._cached_bits = matcher, bits

    def allow(self, out: np.ndarray) -> None:
        """Fills `out`, bool [vocab_size], with what may come next: end tokens exactly where the text so far is complete, and only they
        after one of them.

        Raises GuideError where nothing may, because the vocabulary has no token for what must follow.
        """
        bits = self._bits()
        out.view(np.uint8)[:] = np.unpackbits(bits, count=self.guide.vocab_size, bitorder="little")
        if (bits & self.guide.end_bits).any():
            out[list(self.guide.end_token_ids)] = True

    def take(self, token: int) -> None:
        """Raises GuideError, and stays as it is, for a token that is not allowed."""
        guide, taken = self.guide, False
        if token in guide.end_token_ids:
            if taken := not self._ended and bool((self._bits() & guide.end_bits).any()):
                self._cached_bits = guide.end_bits
        elif not self._ended and 0 <= token < guide.vocab_size and guide.token_bytes[token]:
            if taken := self._matcher.try_consume_tokens([token]) == 1:
                self._cached_bits = None
        if taken:
            self.tokens.append(token)
            return
        what = f"token {token} ({self._text([token])!r})"
        raise GuideError(f"guide.{guide.kind}: {what} is not allowed after {self._text(self.tokens)!r}")

    @property
    def finished(self) -> bool:
        """The text is complete and only an end token can follow, or has."""
        if self._ended:
            return True
        if not self._matcher.is_accepting():
            return False
        return self._matcher.is_stopped() or not (self._bits() & self.guide.text_bits).any()

    def copy(self) -> GuideState:
        return GuideState(self.guide, self._matcher.deep_copy(), self._cached_bits, self.tokens.copy())

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens. Raises GuideError where there are not so many."""
        if not 0 <= num_tokens <= len(self.tokens):
            raise GuideError(f"{num_tokens} tokens cannot be taken back of {len(self.tokens)}")
        if num_tokens:
            self.tokens, gone = self.tokens[:-num_tokens], self.tokens[-num_tokens:]
            self._cached_bits = None
            if self._matcher.is_error():
                self._matcher = self.guide._matcher.deep_copy()
                self._matcher.consume_tokens(self.tokens)
            else:
                self._matcher.rollback(sum(t not in self.guide.end_token_ids for t in gone))

    @property
    def _ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.guide.end_token_ids

    def _bits(self) -> np.ndarray:
        """uint8, one bit a token, and one for the end."""
        if self._cached_bits is None:
            wanted = self.guide.text_bits | self.guide.end_bits
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: len(wanted)] & wanted
            if self._matcher.is_error() or not bits.any():
                raise GuideError(self._why_nothing())
            self._cached_bits = bits
        return self._cached_bits

    def _why_nothing(self) -> str:
        where = f"guide.{self.guide.kind}: after {self._text(self.tokens)!r}"
        message = _message(self._matcher.get_error())
        if message in ("", "NoExtensionBias"):
            return f"{where} no token of the vocabulary continues the text; change the guide, or take a model whose tokenizer has all bytes"
        return f"{where} the library gives up: {message}; a simpler guide would work"

    def _text(self, tokens: Sequence[int]) -> str:
        """The end of their text."""
        texts = self.guide.token_bytes
        return b"".join(texts[t] if 0 <= t < len(texts) else b"" for t in tokens[-40:]).decode(errors="replace")


def allow_all(states: Sequence[GuideState | None], out: np.ndarray) -> dict[int, GuideError]:
    """Fills out, bool [N, vocab_size], row by row; a row without a guide allows everything. Gives the error of each row where nothing
    may follow; that row is False.
    """
    errors = {}
    for row, state in enumerate(states):
        try:
            if state is None:
                out[row] = True
            else:
                state.allow(out[row])
        except GuideError as error:
            out[row] = False
            errors[row] = error
    return errors


def token_bytes(tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> list[bytes]:
    """What each id adds to the text, [vocab_size]; empty for special and end tokens and for ids that the tokenizer does not know."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        name = type(tokenizer).__name__
        raise GuideError(f"a {name} does not tell the bytes of its tokens; a guide needs a tokenizer that has a tokenizer.json")
    told = json.loads(decoder.__getstate__())
    steps = told["decoders"] if told["type"] == "Sequence" else [told]
    kinds = {step["type"] for step in steps}
    replaced = [(s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace"]
    replaced += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
    if not (kinds == {"ByteLevel"} or (kinds <= _JOINED and all(old for old, _ in replaced))):
        raise GuideError(f"guides do not know a tokenizer that decodes with {sorted(kinds)}; GPT-2's (ByteLevel) and SentencePiece's work")
    special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    silent = {*tokenizer.all_special_ids, *end_token_ids, *special}
    found = [b""] * vocab_size
    for piece, i in tokenizer.get_vocab().items():
        if i >= vocab_size or i in silent:
            continue
        if "ByteLevel" in kinds:
            found[i] = _bytes_of(piece)
        elif "ByteFallback" in kinds and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            found[i] = bytes([int(piece[3:5], 16)])
        else:
            for old, new in replaced:
                piece = piece.replace(old, new)
            found[i] = piece.encode()
    return found


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def _bytes_of(piece: str) -> bytes:
    table = _byte_of_char()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.tokens = [*texts, b"\xff[end]"]      # \xff marks what is no text
        self.eos_token_id = len(texts)

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("nothing is tokenized: _FREE")


def _compile(texts: Sequence[bytes], kind: str, value: Any) -> Any:
    try:
        import llguidance
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError as error:
        raise GuideError("a guide needs the library llguidance: pip install 'burnish[guided]'") from error
    matcher = llguidance.LLMatcher
    quiet = llguidance.LLParserLimits(verbose_errors=False)
    vocabulary = llguidance.LLTokenizer(_Vocabulary(texts))
    if kind == "json_schema":
        if not isinstance(value, Mapping):
            raise GuideError(f"guide.json_schema is a mapping, as {{type: object, properties: ...}}; found {value!r}")
        if unknown := list(_unknown_keywords(value)):
            hint = nearest(unknown[0].rpartition(".")[2], _KEYWORDS)
            raise GuideError(f"guide.json_schema: JSON Schema has no keyword {', '.join(unknown)}{hint}; remove it, or name it x-...")
        options = {"json_allowed_escapes": ESCAPES, **(value.get("x-guidance") or {})}
        if not {"whitespace_pattern", "whitespace_flexible"} & options.keys():
            options["whitespace_pattern"] = BLANKS
        try:
            schema = json.dumps({**value, "x-guidance": options}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GuideError(f"guide.json_schema is not JSON: {error}") from error
        plain, free = matcher.grammar_from_json_schema(schema), f"{_FREE}start: %json {schema}"
        help_ = "a keyword that is not known to the guide would not be enforced: leave it out, or say it with those that are"
    elif not isinstance(value, str) or not value:
        raise GuideError(f"guide.{kind} is a text; found {value!r}")
    elif kind == "regex":
        plain, free = matcher.grammar_from_regex(value), f"{_FREE}start: /{llguidance.regex_to_lark(value, '')}/"
        help_ = "regular expressions work without look-around, back references and \\b"
    else:
        try:
            plain = any_to_lark(value) if "::=" in value else value
        except Exception as error:      # it raises plain ones
            raise GuideError(f"guide.grammar cannot be used: {error}") from error
        free = f"{plain}\n{_FREE}"
        help_ = "a grammar is in Lark's notation with a rule `start`, as start: \"a\" /[0-9]+/; special tokens cannot stand in it"
    for text in (plain, free):
        if error := matcher.validate_grammar(text, vocabulary, limits=quiet):
            raise GuideError(f"guide.{kind} cannot be used: {_message(error)}\n{help_}")
    return matcher(vocabulary, free, log_level=0, limits=quiet)


def _unknown_keywords(schema: Any, path: str = "") -> Iterator[str]:
    """Those that would be passed over in silence, as misspelt ones are."""
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        here = f"{path}.{key}".lstrip(".")
        if key not in _KEYWORDS and not str(key).startswith("x-"):
            yield here
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _unknown_keywords(inner, f"{here}.{name}")
        elif key in _SCHEMAS:
            for place, inner in enumerate(value) if isinstance(value, list | tuple) else (("", value),):
                yield from _unknown_keywords(inner, f"{here}.{place}".rstrip("."))


def _message(error: str) -> str:
    """The library's message without its own state and, for a regular expression, without the grammar it was put into."""
    return re.split(r"<(?:state|backtrace|grammar|non-verbose/)|\n +1 \| start: /", error)[0].rpartition("(in regex): ")[2].strip()
