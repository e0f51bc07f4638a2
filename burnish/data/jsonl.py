"""Files with one JSON object a line: their rows, each with its place, and what fields of a row may hold."""

from __future__ import annotations

import difflib
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.types import Message, Prompt


def rows_of(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of each line that is not empty, in UTF-8; a name that ends with .gz is unpacked on the way.

    Raises ValueError, with the line where there is one.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path} (looked from {Path.cwd()})")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if (row := _row(raw, f"{path}:{number}", first=number == 1)) is not None:
                    yield f"{path}:{number}", row
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: not a whole gzip file: {error}") from None


def _row(raw: bytes, where: str, *, first: bool) -> dict[str, Any] | None:
    try:
        text = raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object a line, found {kind_of(row)}")
    return row


def field_of(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        near = difflib.get_close_matches(name, row, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: no field {name!r}; it has {sorted(row)}{hint}")
    return row[name]


def prompt_of(row: Mapping[str, Any], template: str, where: str) -> Prompt:
    """The field of that name, a text or a list of {role, content}; or a text with fields in braces, filled in."""
    if "{" not in template:
        return as_prompt(field_of(row, template, where), template, where)

    def value(match: re.Match[str]) -> str:
        found = field_of(row, match[1], where)
        if not isinstance(found, (str, int, float)):
            raise ValueError(f"{where}: field {match[1]!r} is {kind_of(found)}; the prompt template needs a text or number there")
        return str(found)

    text, slots = re.subn(r"\{([^{}\s]+)\}", value, template)
    if slots == 0:
        raise ValueError(f"the prompt template names no field in braces: {template!r}")
    return text


def as_prompt(value: Any, name: str, where: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{where}: field {name!r} is empty; a prompt needs text")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: field {name!r} is {kind_of(value)}; a prompt is a text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: each message in {name!r} needs role and content as texts; found {str(message)[:80]}")
    return tuple(Message(role=message["role"], content=message["content"]) for message in value)


def as_chat(prompt: Prompt, *, chat: bool, system: str | None) -> Prompt:
    """With chat, a text as a user message after a system message if there is one; else the prompt as it is."""
    if system is not None and not chat:
        raise ValueError("a system message needs chat: true")
    if not chat or not isinstance(prompt, str):
        return prompt
    head = () if system is None else (Message(role="system", content=system),)
    return (*head, Message(role="user", content=prompt))


def kind_of(value: Any) -> str:
    return {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "a truth value"}.get(type(value), "a number")
