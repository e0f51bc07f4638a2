"""YAML 1.2 text to plain data, with the line that every value came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Key = tuple[str | int, ...]
"""Where a value stands: ("rewards", 0, "weight")."""

SCALARS = {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")}


def dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)


@dataclass(frozen=True, slots=True)
class Origin:
    """`name` is a file, or the --set or argument that gave the value; then there are no lines. Lines count from 1."""

    name: str
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        if self.first is None:
            return self.name
        if self.last is None or self.last <= self.first:
            return f"{self.name}, line {self.first}"
        return f"{self.name}, lines {self.first}-{self.last}"


@dataclass(slots=True)
class Document:
    """Data that is being put together: a file first, then what --set and arguments change in it."""

    data: dict[str, Any]
    origins: dict[Key, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, key: Key) -> Origin:
        """Where the value came from; for a missing one, where its section did."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, Origin("settings"))

    def forget(self, key: Key) -> None:
        for known in [k for k in self.origins if k[: len(key)] == key]:
            del self.origins[known]

    def changed_inside(self, key: Key) -> list[Origin]:
        """The --set and arguments that gave something below `key`."""
        return list({str(o): o for k, o in self.origins.items() if k[: len(key)] == key and o.first is None}.values())


def read(text: str, name: str) -> Document:
    """Parse one document. Problems of syntax and repeated keys stand in `problems`, each with file and line."""
    document = Document({}, {(): Origin(name)})
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        document.problems.append(_syntax(error, text, name))
        return document
    except YAMLError as error:
        document.problems.append(f"{name}: this is no YAML text: {' '.join(str(error).split())}")
        return document
    if node is None:
        document.problems.append(f"{name}: the file is empty; `burnish recipes` lists recipes to start from")
    elif not isinstance(node, MappingNode):
        document.problems.append(f"{name}, line 1: expected settings as `section:` or `name: value` lines")
    else:
        document.data = _Builder(document, name).build(node, (), ())
    return document


def read_value(text: str) -> Any:
    """One YAML value, as --set takes it. Raises ValueError."""
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise ValueError(f"{text!r} is no YAML value: {getattr(error, 'problem', None) or error}") from None
    if node is None:
        return None
    document = Document({})
    value = _Builder(document, "").build(node, (), ())
    if document.problems:
        raise ValueError(document.problems[0].rpartition(": ")[2])
    return value


class _Builder:
    def __init__(self, document: Document, name: str) -> None:
        self.document, self.name = document, name

    def build(self, node: Node, key: Key, above: tuple[int, ...]) -> Any:
        if id(node) in above:
            return self._problem(node, key, "an alias that holds itself has no end; write the value out")
        self.document.origins.setdefault(key, Origin(self.name, node.start_mark.line + 1, _last_line(node)))
        above = (*above, id(node))
        if isinstance(node, MappingNode):
            return dict(self._pairs(node, key, above))
        if isinstance(node, SequenceNode):
            return [self.build(child, (*key, i), above) for i, child in enumerate(node.value)]
        try:
            return _scalar(node)
        except (KeyError, ValueError):
            return self._problem(node, key, f"{node.tag} {node.value!r} is not understood; use text, numbers, true, false or null")

    def _pairs(self, node: MappingNode, key: Key, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        lines: dict[str, int] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, ScalarNode):
                self._problem(name_node, key, "a name must be a single text")
                continue
            name, line = name_node.value, name_node.start_mark.line + 1
            if name in lines:
                self._problem(name_node, (*key, name), f"stands twice, first on line {lines[name]}; keep one of the two")
            lines[name] = line
            self.document.origins[(*key, name)] = Origin(self.name, line, _last_line(value_node))
            yield name, self.build(value_node, (*key, name), above)

    def _problem(self, node: Node, key: Key, text: str) -> None:
        where = f"{self.name}, line {node.start_mark.line + 1}"
        self.document.problems.append(": ".join(part for part in (where, dotted(key), text) if part))


def _scalar(node: ScalarNode) -> Any:
    kind, text = SCALARS[node.tag], node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        bare = text.replace("_", "").lstrip("+")
        return int(bare, 0) if "0x" in bare or "0o" in bare else int(bare)
    if kind == "float":
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _last_line(node: Node, above: tuple[int, ...] = ()) -> int:
    if isinstance(node, ScalarNode) or not node.value or id(node) in above:
        return node.start_mark.line + 1
    last = node.value[-1]
    return _last_line(last[1] if isinstance(node, MappingNode) else last, (*above, id(node)))


def _syntax(error: MarkedYAMLError, text: str, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    shown = f": `{lines[line - 1].strip()}`" if line <= len(lines) and lines[line - 1].strip() else ""
    problem = " ".join(str(part) for part in (error.context, error.problem) if part)
    if "\\t" in problem or "\t" in problem:
        problem = "YAML indents with spaces; this line has a tab"
    elif problem.startswith("mapping values are not allowed"):
        problem = "a second `name: value` on one line, or a line indented too far; a text with `: ` in it needs quotes"
    elif error.context_mark and error.context_mark.line + 1 != line:
        problem += f" (it began on line {error.context_mark.line + 1})"
    return f"{name}, line {line}: YAML syntax: {problem}{shown}"
