"""The tables in docs/, made from the code: `python -m docs.tables` names the pages whose tables are stale, `--write` writes them anew.

A table stands between `<!-- table: KIND NAME -->` and `<!-- end -->`. Kinds: `functions` of a room of burnish.algorithms, `settings` of
a section by its name in a recipe, `presets`, the values of an `engine`, and what engines can do (`abilities`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from burnish.config import Sampling
from burnish.config.presets import PRESETS
from burnish.config.schema import place_of, section_of
from burnish.engines import Abilities, named
from burnish.engines.remote import RemoteEngine
from burnish.ref import Ref

DOCS = Path(__file__).parent
TABLE = re.compile(r"(<!-- table: (\w+) ?([\w.]*) -->\n).*?(<!-- end -->)", re.S)
BY_CALLER = {"margin", "temperature", "num_pairs", "num_tokens", "num_rollouts"}
"""Arguments by name that no recipe gives: the trainer does."""
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def renewed(text: str) -> str:
    """A page with its tables as the code has them now."""
    return TABLE.sub(lambda m: m[1] + "\n".join(KINDS[m[2]](*filter(None, [m[3]]))) + "\n" + m[4], text)


# functions

def functions_of(room: str) -> dict[str, Callable[..., Any]]:
    """The public functions of a room of burnish.algorithms, in the order of the file, without its decorators."""
    module = importlib.import_module(f"burnish.algorithms.{room}")
    return {
        name: fn for name, fn in vars(module).items()
        if inspect.isfunction(fn) and fn.__module__ == module.__name__ and not name.startswith("_") and [*_parameters(fn)] != ["fn"]
    }


def _functions(room: str) -> Iterator[str]:
    marks = {"advantages": ("over_batch", "the step", "its group"), "preference_losses": ("coupled", "all pairs of the step", "its pair")}
    mark, yes, no = marks.get(room, (None, "", ""))
    yield from _row("function", "takes", *(["looks at"] if mark else []), "values", "in short")
    yield from _rule(5 if mark else 4)
    for name, fn in functions_of(room).items():
        provided = {*BY_CALLER, *(["delta"] if getattr(fn, "running_delta", False) else [])}
        given = [n for n, p in _parameters(fn).items() if p.kind is not p.KEYWORD_ONLY or n in provided]
        values = [f"{n}{'' if p.default is p.empty else f' = {_value(p.default)}'}" for n, p in _parameters(fn).items() if n not in given]
        looks = [yes if getattr(fn, mark, False) else no] if mark else []
        yield from _row(f"`{name}`", ", ".join(given), *looks, ", ".join(values), _text(inspect.getdoc(fn).partition("\n")[0]))


def _parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(fn).parameters)


# settings

def _settings(section: str) -> Iterator[str]:
    model = section_of(place_of(tuple(0 if part == "0" else part for part in section.split("."))))
    yield from _row("setting", "value", "default", "meaning")
    yield from _rule(4)
    for name, info in model.model_fields.items():
        inner = section_of(info.annotation)
        default = "needed" if info.default is PydanticUndefined else _code(info.default)
        meaning = _text(info.description or (inner.__doc__ if inner else "") or "")
        yield from _row(f"`{name}`", _kind(info.annotation, info.metadata), default, meaning)


def _kind(place: Any, metadata: Iterable[Any] = ()) -> str:
    """A type in words."""
    origin = get_origin(place)
    if origin is Annotated:
        return _kind(get_args(place)[0], get_args(place)[1:])
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if arg is types.NoneType else _kind(arg) for arg in get_args(place))
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in get_args(place))
    if origin is tuple:
        items = get_args(place)
        return f"list of {_kind(items[0])}" if items[-1] is Ellipsis else ", ".join(map(_kind, items))
    if place is Ref:
        return "reference"
    if inspect.isclass(place) and issubclass(place, BaseModel):
        return "section"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    return " ".join([names.get(place, "mapping"), *_bounds(metadata)])


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    flat = [inner for item in metadata for inner in (item.metadata if hasattr(item, "metadata") else [item])]
    found = [f"{sign} {getattr(item, name):g}" for item in flat for name, sign in BOUNDS.items() if getattr(item, name, None) is not None]
    yield from [", ".join(found)] if found else []


# presets

LOSSES = ("algo.loss", "preference.losses", "sft.loss", "reward_model.loss", "distill.divergence")
REDUCTIONS = ("algo.reduce", "sft.reduce", "distill.reduce")


def _presets() -> Iterator[str]:
    yield from _row("preset", "about", "loop", "advantage", "loss", "reduce", "what else", "your recipe gives", "source")
    yield from _rule(9)
    for name, preset in PRESETS.items():
        values = dict(_sections(preset.values))
        cells = [
            ", ".join(f"`{_call(values.pop(key))}`" for key in keys if values.get(key) is not None)
            for keys in (("loop",), ("algo.advantage",), LOSSES, REDUCTIONS)
        ]
        rest = [f"`{key.removeprefix('algo.')}: {_value(value)}`" for key, value in values.items()]
        yield from _row(
            f"`{name}`", _text(preset.about), cells[0] or "`sync`", *cells[1:], ", ".join(rest), ", ".join(f"`{n}`" for n in preset.needs),
            _text(preset.source),
        )


def _call(part: Any) -> str:
    """A reference, or a mixture of losses, as a call of functions."""
    if isinstance(part, list | tuple):
        return " + ".join((f"{term['weight']:g} " if "weight" in term else "") + _call(term["fn"]) for term in part)
    if isinstance(part, Mapping):
        values = ", ".join(f"{name}={_value(value)}" for name, value in part.items() if name != "ref")
        return part["ref"] + (f"({values})" if values else "")
    return str(part)


def _sections(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What stands in the sections of a recipe, by dotted name."""
    for section, held in values.items():
        if isinstance(held, Mapping) and held:
            yield from ((f"{section}.{name}", value) for name, value in held.items())
        else:
            yield section, held


# engines

def _engine(name: str) -> Iterator[str]:
    yield from _row("value", "default")
    yield from _rule(2)
    for value, p in _parameters(getattr(named, name)).items():
        if value not in ("policy", "tokenizer", "context_tokens"):
            yield from _row(f"`{value}`", "needed" if p.default is p.empty else _code(p.default))


def _abilities() -> Iterator[str]:
    made = {**{name: getattr(named, name) for name in named.__all__}, "remote": RemoteEngine}
    yield from _row("", *(f"`{name}`" for name in made))
    yield from _rule(1 + len(made))
    for field in fields(Abilities):
        if field.name != "sampling":
            yield from _row(f"`{field.name}`", *("yes" if getattr(engine.abilities, field.name) else "no" for engine in made.values()))
    for name in Sampling.model_fields:
        yield from _row(f"`sampling.{name}`", *("yes" if name in engine.abilities.sampling else "refused" for engine in made.values()))


# cells

def _value(value: Any) -> str:
    """As it is written in YAML on one line."""
    if isinstance(value, Ref):
        value = value.dump()
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping) and [*value] == ["ref"]:
        value = value["ref"]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w.:/-]+", value) else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _code(value: Any) -> str:
    return f"`{_value(value)}`"


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("*", "\\*").strip()


def _row(*cells: str) -> Iterator[str]:
    yield "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> Iterator[str]:
    yield "|" + "---|" * columns


KINDS: dict[str, Callable[..., Iterator[str]]] = {
    "functions": _functions, "settings": _settings, "presets": _presets, "engine": _engine, "abilities": _abilities,
}


def main(write: bool) -> int:
    stale = {page: new for page in pages() if (new := renewed(old := page.read_text())) != old}
    for page, new in stale.items():
        if write:
            page.write_text(new)
        print(f"{'written' if write else 'stale'}: {page.relative_to(DOCS.parent)}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
