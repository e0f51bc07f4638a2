"""From a recipe and changes to settings. Nothing is filled in from elsewhere; whatever is wrong is told with file and line."""

from __future__ import annotations

import copy
import difflib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from burnish.config import schema
from burnish.config.document import Document, Key, Origin, dotted, read, read_value
from burnish.config.dump import diff, dump
from burnish.config.errors import SettingsError, explain, found
from burnish.config.presets import preset_of
from burnish.config.settings import METHODS, Settings
from burnish.ref import Ref

__all__ = ["RecipeInfo", "SettingsError", "diff", "dump", "load_recipe", "resumable_changes", "shipped"]

RESUMABLE = (
    "about", "expect", "optim", "critic.lr", "evaluate.every_steps", "checkpoint", "monitor", "train.steps", "train.max_skipped_updates",
    "train.tokens_per_micro_batch",
)
"""What may change when a run goes on: nothing that decides which rollouts come out or what the loss is."""
OF_METHOD = ("loop", *METHODS, "critic", "constraint")
"""What of a recipe is left out when --set names another preset."""


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    name: str
    about: str
    expect: str
    preset: str | None
    path: Path


def load_recipe(
    name_or_path: str | os.PathLike,
    *,
    sets: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    note: Callable[[str], None] | None = None,
) -> Settings:
    """The settings of a shipped recipe (by name) or of a YAML file, after changes.

    What its preset says is laid under what the recipe says; a preset given by --set takes the place of the recipe's own method.
    sets: texts `section.key=value`, the value in YAML, in the order in which they apply.
    overrides: the same from Python, applied last: dotted names, sections as mappings, or the bare name of a setting
        that stands in one of the recipe's sections only (steps, lr); functions may stand where an import path may.
    note: called with a line about what was left out on the way; by default it goes to stderr.
    Raises SettingsError with every problem that was found.
    """
    path = _find(name_or_path)
    document = read(_text(path), _shown(path))
    return _finish(document, sets, overrides or {}, note or (lambda line: print(f"note: {line}", file=sys.stderr)))


def shipped() -> list[RecipeInfo]:
    """The recipes that come with burnish."""
    infos = []
    for path in sorted(_recipe_folder().glob("*.yaml")):
        data = read(_text(path), _shown(path)).data
        infos.append(RecipeInfo(path.stem, str(data.get("about", "")), str(data.get("expect", "")), data.get("preset"), path))
    return infos


def resumable_changes(old: Settings, new: Settings) -> list[str]:
    """What differs, as lines to show. SettingsError where something differs that a run cannot change half-way."""
    changes = diff(old, new)
    refused = [line for line in changes if not line.startswith(tuple(f"{name}{end}" for name in RESUMABLE for end in ".:"))]
    if refused:
        allowed = ", ".join(f"{name}.*" if schema.section_of(schema.place_of((name,))) else name for name in RESUMABLE)
        why = f"cannot change when a run is resumed; start a new run for it, or change one of {allowed}"
        raise SettingsError([f"{line}: {why}" for line in refused])
    return changes


def _recipe_folder() -> Path:
    """Inside the package where it is installed from a wheel, beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"


def _find(name_or_path: str | os.PathLike) -> Path:
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    names = {p.stem: p for p in _recipe_folder().glob("*.yaml")}
    if path.is_dir() and text not in names:
        hint = "to go on with the run in it use --resume; for a new run like it " if (path / "settings.yaml").is_file() else ""
        raise SettingsError([f"{text} is a folder; {hint}give a YAML file such as {path / 'settings.yaml'}"])
    if path.is_file():
        return path
    if text in names:
        return names[text]
    near = difflib.get_close_matches(path.stem, names, 1, 0.5)
    if os.sep in text or path.suffix in (".yaml", ".yml"):
        beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, 1, 0.5)
        if close:
            hint = f"; did you mean {path.parent / close[0]}?"
        else:
            hint = f"; did you mean the shipped recipe {near[0]}?" if near else f"; relative paths start at {Path.cwd()}"
        raise SettingsError([f"no such file: {text}{hint}"])
    hint = f"did you mean {near[0]}? " if near else ""
    own = f"For a file of your own write its path, as {text}.yaml"
    raise SettingsError([f"no recipe is called {text!r}; {hint}`burnish recipes` lists all {len(names)}. {own}"])


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError([f"{path}: no UTF-8 text (byte {error.start}); a recipe is a YAML file"]) from None
    except OSError as error:
        raise SettingsError([f"{path}: cannot be read: {error.strerror}"]) from None


def _finish(document: Document, sets: Sequence[str], overrides: Mapping[str, Any], note: Callable[[str], None]) -> Settings:
    changed: list[Key] = []
    _preset(document, sets, overrides, note)
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            document.problems.append(f"--set {text}: expected section.key=value, as --set train.steps=100")
            continue
        try:
            changed.append(_assign(document, name.strip(), read_value(value), Origin(f"--set {text}")))
        except ValueError as error:
            document.problems.append(f"--set {text}: {error}")
    for name, value in overrides.items():
        try:
            for full, plain in _spread(*_override(name, value, document.data)):
                changed.append(_assign(document, full, plain, Origin(f"{name}={_short(value)}")))
        except ValueError as error:
            document.problems.append(f"{name}={_short(value)}: {error}")
    _one_model(document, changed, note)
    return _validate(document)


def _preset(document: Document, sets: Sequence[str], overrides: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Lay the values of the preset under the recipe, that of --set or an argument before the recipe's own."""
    given = [(f"--set {text}", text.partition("=")[2]) for text in sets if text.partition("=")[0].strip() == "preset" and "=" in text]
    try:
        given = [(origin, read_value(value)) for origin, value in given]
    except ValueError:
        return          # told where --set is applied
    if "preset" in overrides:
        given.append((f"preset={_short(overrides['preset'])}", overrides["preset"]))
    origin, name = given[-1] if given else (str(document.origin(("preset",))), document.data.get("preset"))
    if not isinstance(name, str):
        return
    try:
        values = preset_of(name).values
    except ValueError as error:
        raise SettingsError([*document.problems, f"{origin}: preset: {error}"]) from None
    if given:
        _make_room(document, values, origin, note)
    _lay_under(document, (), document.data, values, Origin(f"preset {name}"))


def _make_room(document: Document, values: Mapping[str, Any], origin: str, note: Callable[[str], None]) -> None:
    """Take out of the recipe what a preset that comes by --set is to decide."""
    gone = [name for name in OF_METHOD if document.data.get(name) is not None]
    for name in OF_METHOD:
        document.data.pop(name, None)
        document.forget((name,))
    for name, value in values.items():
        section = document.data.get(name)
        for inner in set(value) & set(section) if isinstance(section, dict) and isinstance(value, dict) else ():
            gone.append(f"{name}.{inner}")
            del section[inner]
            document.forget((name, inner))
    if gone:
        note(f"{', '.join(gone)} of the recipe {'is' if len(gone) == 1 else 'are'} left out, because {origin} gives the method")


def _lay_under(document: Document, key: Key, above: dict[str, Any], below: Mapping[str, Any], origin: Origin) -> None:
    """Add what `above` does not say. A reference that it names is whole; one without `ref` changes values of the one below."""
    for name, value in below.items():
        here = (*key, name)
        if name not in above:
            above[name] = copy.deepcopy(value)
            document.origins[here] = origin
        elif isinstance(value, dict) and isinstance(above[name], dict) and "ref" not in above[name]:
            _lay_under(document, here, above[name], value, origin)
        elif name in METHODS and above[name] is None:
            why = f"found nothing (null), which takes away what {origin} gives; remove it"
            document.problems.append(f"{document.origin(here)}: {name}: {why}")


def _validate(document: Document) -> Settings:
    problems = document.problems
    if not document.data and problems:
        raise SettingsError(problems)
    try:
        settings = Settings.model_validate_json(json.dumps(document.data), context={"preset": "laid under"})
    except ValidationError as error:
        raise SettingsError([*problems, *explain(error, document)]) from None
    if problems:
        raise SettingsError(problems)
    return settings


def _assign(document: Document, name: str, value: Any, origin: Origin) -> Key:
    """Put a value into the tree, making the sections on the way. ValueError says which step cannot be taken."""
    parts = name.split(".")
    if not all(parts):
        raise ValueError(f"{name!r} is no name of a setting; write section.key, as train.steps")
    node: Any = document.data
    key: Key = ()
    for depth, part in enumerate(parts):
        step = _step(node, key, part)
        last = depth == len(parts) - 1
        below = value if last else _opened(node, key, step)
        if isinstance(node, list) and step == len(node):
            node.append(below)
        else:
            node[step] = below
        key = (*key, step)
        if last:
            document.forget(key)
            document.origins[key] = origin
        else:
            document.origins.setdefault(key, origin)
        node = below
    return key


def _step(node: Any, key: Key, part: str) -> str | int:
    if isinstance(node, dict):
        return part
    if not part.isdecimal() or int(part) > len(node):
        entries = f"entries 0 to {len(node) - 1}" if node else "no entries yet"
        raise ValueError(f"{dotted(key)} is a list with {entries} ({len(node)} adds one); found {part!r}")
    return int(part)


def _opened(node: Any, key: Key, step: str | int) -> Any:
    """The section, list or reference below, ready to take a value: what stands there, or else its default."""
    here = (*key, step)
    place = schema.place_of(here)
    value = node.get(step) if isinstance(node, dict) else (node[step] if step < len(node) else None)
    if value is None:
        value = _default(here, place)
    if schema.is_ref(place) and isinstance(value, str):
        value = {"ref": value}
    if place is None and not isinstance(value, dict | list):
        return {}
    if not isinstance(value, dict | list):
        raise ValueError(f"{dotted(here)} is a single value ({found(value)}); nothing stands below it")
    return value


def _default(key: Key, place: Any) -> Any:
    default = schema.default_of(key)
    if isinstance(default, Ref | tuple):
        return _plain(default)
    if place is None or schema.section_of(place) or schema.is_open(place):
        return {}
    if schema.is_list(place):
        return []
    return default if default is not None else "not set"


def _override(name: str, value: Any, recipe: Mapping[str, Any]) -> tuple[str, Any]:
    """The full name of an argument from Python, and its value as plain data."""
    if "." not in name and name not in Settings.model_fields:
        every = [place for place in schema.places().get(name, ()) if place.count(".") == 1]
        at = [place for place in every if _is_there(place.partition(".")[0], recipe)] or every
        if len(at) > 1:
            ways = " or ".join(f"{place.partition('.')[0]}={{{name!r}: ...}}" for place in at)
            raise ValueError(f"{name} stands in more than one section; write {ways}")
        name = at[0] if at else name
    plain = _plain(value)
    if name == "model" and isinstance(plain, str):
        return "model.path", plain
    if name == "rewards":
        plain = plain if isinstance(plain, list) else [plain]
        plain = [{"fn": one} if isinstance(one, str) or (isinstance(one, dict) and "ref" in one) else one for one in plain]
    if name == "tasks" and (isinstance(plain, str) or (isinstance(plain, dict) and "ref" in plain)):
        return "tasks.source", plain
    return name, plain


def _is_there(section: str, recipe: Mapping[str, Any]) -> bool:
    """Every run has the section, or the recipe gives it."""
    return Settings.model_fields[section].default is not None or recipe.get(section) is not None


def _spread(name: str, value: Any) -> list[tuple[str, Any]]:
    """A section given as a mapping changes only what it names."""
    if isinstance(value, dict) and value and schema.section_of(schema.place_of(tuple(name.split(".")))):
        return [one for part, inner in value.items() for one in _spread(f"{name}.{part}", inner)]
    return [(name, value)]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if isinstance(value, Ref):
        return _plain(value.dump())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if callable(value):
        return _plain(Ref.of(value).dump())
    raise ValueError(f"a setting is plain data (text, numbers, lists, mappings) or a function; found {type(value).__name__}")


def _short(value: Any) -> str:
    text = getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _one_model(document: Document, changed: Sequence[Key], note: Callable[[str], None]) -> None:
    """A model given by --set takes the place of the recipe's, whichever of the two kinds it is."""
    model = document.data.get("model")
    if not isinstance(model, dict):
        return
    for mine, other in (("path", "scratch"), ("scratch", "path")):
        given = any(key[:2] == ("model", mine) for key in changed) and model.get(mine) is not None
        if given and model.get(other) is not None and not any(key[:2] == ("model", other) for key in changed):
            note(f"model.{other} of the recipe is left out, because {document.origin(('model', mine))} gives model.{mine}")
            del model[other]
            document.forget(("model", other))
