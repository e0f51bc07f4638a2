"""Settings as YAML that loads back to the same settings, and the difference of two."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from burnish.config import schema
from burnish.config.document import Key, dotted
from burnish.config.settings import Settings

WIDTH = 140
PLAIN_TEXT = re.compile(r"([A-Za-z_/]|\.{1,2}/|~/)[A-Za-z0-9_./+@-]*(:[A-Za-z0-9_./+@-]+)*")
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
"""Words that some version of YAML reads as something other than text."""


def dump(settings: Settings) -> str:
    """Every setting, with its meaning as a comment where that fits on the line."""
    return dump_values(settings.model_dump())


def dump_values(values: Mapping[str, Any]) -> str:
    """A part of the tree, as plain data."""
    return "\n".join(_section(values, (), "")) + "\n"


def diff(a: Settings, b: Settings) -> list[str]:
    """One line for each setting that differs: `train.steps: 100 -> 200`."""
    return list(_changes(a.model_dump(), b.model_dump(), ()))


def _section(data: Mapping[str, Any], key: Key, indent: str) -> list[str]:
    lines = []
    for name, value in data.items():
        here = (*key, name)
        lines += _entry(f"{indent}{_text(name)}:", value, here, indent)
    return lines


def _entry(head: str, value: Any, key: Key, indent: str) -> list[str]:
    if isinstance(value, dict) and list(value) == ["ref"] and schema.is_ref(schema.place_of(key)):
        value = value["ref"]
    if isinstance(value, dict) and value:
        return [_comment(head, key), *_section(value, key, indent + "  ")]
    if isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        lines = [_comment(head, key)]
        for i, item in enumerate(value):
            below = _section(item, (*key, i), indent + "    ") if isinstance(item, dict) and item else [f"{indent}    {_flow(item)}"]
            lines += [f"{indent}  - {below[0].strip()}", *below[1:]]
        return lines
    return [_comment(f"{head} {_flow(value)}", key)]


def _comment(line: str, key: Key) -> str:
    doc = schema.doc_of(key)
    if not doc:
        return line
    with_doc = f"{line}  # {' '.join(doc.split())}"
    return with_doc if len(with_doc) <= WIDTH else line


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(str(k))}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value)


def _number(value: float) -> str:
    """With a point always, so that readers of YAML 1.1 see a number too."""
    if math.isnan(value) or math.isinf(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{e}{exponent}"


def _text(text: str) -> str:
    if PLAIN_TEXT.fullmatch(text) and text.lower() not in NOT_TEXT:
        return text
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(c: str) -> str:
    if c in ('"', "\\"):
        return "\\" + c
    if c.isprintable():
        return c
    if c in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[c]
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _changes(old: Any, new: Any, key: Key) -> Iterator[str]:
    """A reference counts as one value, and so does a section or list that is there on one side only."""
    place = schema.place_of(key)
    if isinstance(old, dict) and isinstance(new, dict) and not schema.is_ref(place):
        for part in dict.fromkeys([*old, *new]):
            yield from _changes(old.get(part), new.get(part), (*key, part))
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) and schema.section_of(schema.child(place, 0)):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from _changes(*pair, (*key, i))
    elif old != new:
        yield f"{dotted(key)}: {_flow(old)} -> {_flow(new)}"
