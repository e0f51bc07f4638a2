"""Ref: the one plug-in mechanism. An import path plus values, checked by name against the signature at start."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RefError(ValueError):
    """A reference that does not import, or whose values do not fit the signature."""


@dataclass(frozen=True, slots=True)
class Ref:
    """`path` is "module:name", "file.py:name", or a short name that the place it stands in completes.

    In YAML: `loss: ppo_clip`, or `loss: {ref: my_ideas:soft_gate, temperature: 1.0}`.
    """

    path: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Any) -> Ref:
        if isinstance(raw, Ref):
            return raw
        if isinstance(raw, str):
            return cls(raw)
        if isinstance(raw, Mapping):
            if not isinstance(raw.get("ref"), str):
                raise ValueError(f"a reference with values needs the key `ref` (an import path); found the keys {sorted(raw)}")
            return cls(raw["ref"], {k: v for k, v in raw.items() if k != "ref"})
        if callable(raw):
            return cls.of(raw)
        raise ValueError(f"expected an import path like my_file:my_function, or a mapping with `ref`; found {raw!r}")

    @classmethod
    def of(cls, fn: Callable, **values: Any) -> Ref:
        """The reference of a function that stands in an importable module."""
        if "<" in fn.__qualname__ or "." in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is nested; a part must stand at the top level of a module or file")
        module = fn.__module__
        if module == "__main__":
            module = getattr(sys.modules["__main__"], "__file__", None)
            if module is None:
                raise ValueError(f"{fn.__qualname__} is defined in an interactive session; put it in a file and import it")
            module = os.path.abspath(module)
        return cls(f"{module}:{fn.__qualname__}", values)

    def dump(self) -> str | dict[str, Any]:
        return {"ref": self.path, **self.values} if self.values else self.path

    def load(self, *, room: str | None = None) -> Callable:
        """Import the function or class this points at. `room` completes a short name."""
        module_name, name = self._split(room)
        module = _import(self.path, module_name)
        if not hasattr(module, name):
            near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RefError(f"{self.path}: module {module_name} has no {name!r}{hint}")
        fn = getattr(module, name)
        if not callable(fn):
            raise RefError(f"{self.path} is a {type(fn).__name__}, not a function or class")
        return fn

    def bind(self, *, provided: Iterable[str] = (), room: str | None = None) -> Callable:
        """The function with its values filled in. `provided` names the arguments that the caller will pass.

        Raises RefError for a value the function does not take, or a required argument that nobody provides.
        """
        fn = self.load(room=room)
        check_signature(self.path, fn, self.values, provided)
        return functools.partial(fn, **self.values) if self.values else fn

    def _split(self, room: str | None) -> tuple[str, str]:
        if ":" in self.path:
            module, _, name = self.path.rpartition(":")
            return module, name
        if shipped := importlib.metadata.entry_points(group="burnish.parts", name=self.path):
            module, _, name = next(iter(shipped)).value.partition(":")
            return module, name
        if room is None:
            raise RefError(f"{self.path!r} is no import path; write module:name or file.py:name")
        return room, self.path


def parameters(fn: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(fn).parameters)


def check_signature(path: str, fn: Callable, values: Mapping[str, Any], provided: Iterable[str]) -> None:
    params = parameters(fn)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
    named = [n for n, p in params.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unknown := [n for n in values if n not in named]:
        if not takes_any:
            near = difflib.get_close_matches(unknown[0], named, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RefError(f"{path} takes no {unknown}; it takes {named}{hint}")
    have = {*values, *provided}
    if missing := [n for n in named if params[n].default is inspect.Parameter.empty and n not in have]:
        raise RefError(f"{path} needs {missing}, which neither the recipe nor this place provides")


def _import(path: str, module_name: str) -> Any:
    try:
        if module_name.endswith(".py"):
            return _import_file(Path(module_name))
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())
        return importlib.import_module(module_name)
    except Exception as error:
        raise RefError(f"cannot import {path}: {type(error).__name__}: {error}") from error


def _import_file(file: Path) -> Any:
    file = file.resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) and Path(main.__file__).resolve() == file:
        return main
    name = "burnish_file_" + str(file).replace(os.sep, "_").removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
