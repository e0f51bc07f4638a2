"""Ref: the one plug-in mechanism. An import path plus values, checked by name against the signature at start."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_MODULE = "burnish_file_"


class RefError(ValueError):
    """A reference that does not import, or whose values do not fit the signature."""


@dataclass(frozen=True, slots=True)
class Ref:
    """`path` is "module:name", "file.py:name", or a short name that the place it stands in completes.

    In YAML: `loss: ppo_clip`, or `loss: {ref: my_ideas:soft_gate, temperature: 1.0}`.
    """

    path: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("an empty text is no import path; write my_file:my_function, or a short name")
        if "ref" in self.values:
            raise ValueError(f"{self.path}: `ref` is the import path itself and cannot be a value's name too")

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
        """The reference of a function that stands in an importable module, or of a functools.partial of one."""
        if isinstance(fn, functools.partial):
            if fn.args:
                raise ValueError(f"{fn} has values by position; give them by name")
            return cls.of(fn.func, **{**fn.keywords, **values})
        if not hasattr(fn, "__qualname__"):
            raise ValueError(f"{fn!r} is an object, not a function or class; name it by import path (module:name) or give a function")
        if "<" in fn.__qualname__ or "." in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is nested; a part must stand at the top level of a module or file")
        module = fn.__module__
        if module.startswith(FILE_MODULE):
            module = sys.modules[module].__file__
        elif module == "__main__":
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
            raise RefError(f"{self.path}: {module_name} has no {name!r}{self._hint(module, name)}")
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
        """Module and name. A short name is looked for in the room first, then among the parts of installed packages."""
        if ":" in self.path:
            module, _, name = self.path.rpartition(":")
            return module, name
        if room is not None and hasattr(_import(self.path, room), self.path):
            return room, self.path
        if shipped := importlib.metadata.entry_points(group="burnish.parts", name=self.path):
            module, _, name = next(iter(shipped)).value.partition(":")
            return module, name
        if room is None:
            raise RefError(f"{self.path!r} is no import path; write module:name or file.py:name")
        return room, self.path

    def _hint(self, module: Any, name: str) -> str:
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_") and _is_from(v, module)]
        own = list(dict.fromkeys([*own, *getattr(module, "__all__", ())]))
        beside, found = Path.cwd() / f"{module.__name__}.py", getattr(module, "__file__", None)
        if beside.is_file() and found is not None and beside.resolve() != Path(found).resolve():
            return f"; this is {found}. For the file here write {beside.name}:{name}"
        if near := difflib.get_close_matches(name, own, 1):
            return f"; did you mean {near[0]!r}?"
        if ":" in self.path:
            return f"; it has {', '.join(own)}" if own else ""
        outer, _, inner = name.rpartition(".")
        return f"; for a function of your own write {outer or 'my_file'}:{inner}" + (f"; shipped are {', '.join(own)}" if own else "")


def _is_from(part: Any, module: Any) -> bool:
    home = getattr(part, "__module__", None) or ""
    return home == module.__name__ or home.startswith(module.__name__ + ".")


def parameters(fn: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(fn).parameters)


def check_signature(path: str, fn: Callable, values: Mapping[str, Any], provided: Iterable[str]) -> None:
    """RefError for a value that `fn` does not take, that the caller passes too, or an argument that nobody gives."""
    try:
        params = parameters(fn)
    except (ValueError, TypeError):
        raise RefError(f"{path} does not tell which arguments it takes; wrap it in a function that does") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
    named = [n for n, p in params.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unknown := [n for n in values if n not in named]:
        if not takes_any:
            near = difflib.get_close_matches(unknown[0], named, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RefError(f"{path} takes no {unknown}; it takes {named}{hint}")
    if by_place := [n for n in values if n in named and params[n].kind is inspect.Parameter.POSITIONAL_ONLY]:
        raise RefError(f"{path} takes {by_place} by position only, and values are passed by name; remove the / from its signature")
    provided = tuple(provided)
    if twice := [n for n in values if n in provided]:
        raise RefError(f"{path}: {twice} are passed by the caller, so they cannot be values of the recipe too")
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
    except (Exception, SystemExit) as error:   # SystemExit: a script that reads its arguments when it is imported
        raise RefError(f"cannot import {path}: {type(error).__name__}: {error}{_where(error, module_name)}") from error


def _where(error: BaseException, module_name: str) -> str:
    """The line of the user's file that raised, or where a module that is not there was looked for."""
    if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
        near = difflib.get_close_matches(module_name, [p.stem for p in Path.cwd().glob("*.py")], 1)
        return f"; did you mean {near[0]}?" if near else f" (looked in {Path.cwd()} and among the installed packages)"
    if isinstance(error, SyntaxError | FileNotFoundError):
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen") and f.filename != __file__]
    own = [f for f in frames if os.sep + "importlib" + os.sep not in f.filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _import_file(file: Path) -> Any:
    file = file.resolve()
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], 1) if file.parent.is_dir() else []
        raise FileNotFoundError(f"no such file: {file}" + (f"; did you mean {near[0]}?" if near else ""))
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) and Path(main.__file__).resolve() == file:
        return main
    name = f"{FILE_MODULE}{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))   # so that it finds the files beside it, as a script does
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
