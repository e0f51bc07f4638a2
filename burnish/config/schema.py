"""What may stand where in the tree of settings: read off the pydantic models, for --set, hints and dump."""

from __future__ import annotations

import functools
import types
import typing
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from burnish.config.document import Key
from burnish.config.settings import Settings
from burnish.ref import Ref


def alternatives(place: Any) -> tuple[Any, ...]:
    """The types of a place, without Annotated and None."""
    origin = typing.get_origin(place)
    if origin is Annotated:
        return alternatives(typing.get_args(place)[0])
    if origin in (Union, types.UnionType):
        return tuple(a for arg in typing.get_args(place) if arg is not type(None) for a in alternatives(arg))
    return (place,)


def section_of(place: Any) -> type[BaseModel] | None:
    return next((a for a in alternatives(place) if isinstance(a, type) and issubclass(a, BaseModel)), None)


def is_ref(place: Any) -> bool:
    return Ref in alternatives(place)


def is_list(place: Any) -> bool:
    return any(typing.get_origin(a) is tuple for a in alternatives(place))


def is_open(place: Any) -> bool:
    """Any names may stand below: values of a reference, the configuration of a model."""
    return is_ref(place) or any(a is Any or typing.get_origin(a) is dict for a in alternatives(place))


def child(place: Any, part: str | int) -> Any | None:
    """The place below, or None where nothing of this name may stand."""
    if section := section_of(place):
        info = section.model_fields.get(part) if isinstance(part, str) else None
        return None if info is None else info.annotation
    if is_list(place) and isinstance(part, int):
        items = next(typing.get_args(a) for a in alternatives(place) if typing.get_origin(a) is tuple)
        return items[0] if items[-1] is Ellipsis else (items[part] if 0 <= part < len(items) else None)
    return Any if is_open(place) else None


def place_of(key: Key) -> Any | None:
    place: Any = Settings
    for part in key:
        place = child(place, part)
        if place is None:
            return None
    return place


def default_of(key: Key) -> Any:
    """The default of a setting as it stands in a Settings; PydanticUndefined where it has none."""
    section = section_of(place_of(key[:-1])) if key else None
    return section.model_fields[key[-1]].default if section and key[-1] in section.model_fields else PydanticUndefined


def doc_of(key: Key) -> str | None:
    """The docstring of a setting, or that of the section it holds."""
    section = section_of(place_of(key[:-1])) if key else None
    if section is None or key[-1] not in section.model_fields:
        return None
    info = section.model_fields[key[-1]]
    inner = section_of(info.annotation)
    return info.description or (inner.__doc__ if inner else None)


@functools.cache
def places() -> dict[str, tuple[str, ...]]:
    """Each setting's name to the dotted names of the places where it may stand."""
    found: dict[str, list[str]] = {}

    def walk(section: type[BaseModel], above: str) -> None:
        for name, info in section.model_fields.items():
            found.setdefault(name, []).append(above + name)
            inner = info.annotation
            if is_list(inner) and section_of(child(inner, 0)):
                walk(section_of(child(inner, 0)), f"{above}{name}.0.")
            elif section_of(inner):
                walk(section_of(inner), f"{above}{name}.")

    walk(Settings, "")
    return {name: tuple(where) for name, where in found.items()}
