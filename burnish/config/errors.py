"""Errors of settings: where it stands, what was found, what would work."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from burnish.config import schema
from burnish.config.document import Document, Key, dotted
from burnish.config.settings import Settings

TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text", "tuple": "a list",
    "dict": "a section of `name: value` lines", "model": "a section", "list": "a list",
}

ELSEWHERE = {
    "learning_rate": "optim.lr", "max_grad_norm": "optim.clip_norm", "grad_clip": "optim.clip_norm", "adam_betas": "optim.betas",
    "warmup_steps": "optim.warmup_updates", "lr_scheduler_type": "optim.schedule", "lr_schedule": "optim.schedule",
    "batch_size": "train.prompts_per_step, or train.examples_per_step for written answers",
    "num_generations": "train.samples_per_prompt", "group_size": "train.samples_per_prompt",
    "max_steps": "train.steps", "num_iterations": "train.epochs", "num_train_epochs": "train.epochs",
    "micro_batch_size": "train.tokens_per_micro_batch", "gradient_accumulation_steps": "train.tokens_per_micro_batch",
    "max_tokens": "sampling.max_new_tokens", "max_completion_length": "sampling.max_new_tokens", "stop_strings": "sampling.stop",
    "eos_token": "sampling.end_tokens", "beta": "algo.kl.coef, or preference.losses.0.fn.beta", "kl_coef": "algo.kl.coef",
    "epsilon": "algo.loss.eps_low", "target_kl": "algo.stop_at_kl_nats", "entropy_coef": "algo.entropy.coef",
    "dynamic_sampling": "algo.constant_groups (refill)", "mask_truncated_completions": "algo.truncated (drop)",
    "importance_sampling_correction": "algo.correction", "lam": "algo.advantage.lam", "gae_lambda": "algo.advantage.lam",
    "vf_coef": "critic.coef", "value_clip": "critic.loss.clip", "cliprange_value": "critic.loss.clip",
    "label_smoothing": "preference.losses.0.fn.label_smoothing", "rpo_alpha": "preference.nll_coef", "ld_alpha": "preference.length_alpha",
    "use_weighting": "preference.weigh_by_policy", "reference_free": "preference.reference (none)",
    "sync_ref_model": "preference.refresh_steps", "ref_model_sync_steps": "preference.refresh_steps",
    "ref_model_mixup_alpha": "preference.refresh_mix", "center_rewards_coefficient": "reward_model.center_coef",
    "lmbda": "distill.on_policy_frac", "teacher_model_name_or_path": "distill.teachers.0.model.path", "max_length": "data.max_tokens",
    "model_name": "model.path", "model_path": "model.path", "model_name_or_path": "model.path",
    "dataset": "tasks.source, or data.source for written answers",
    "reward_funcs": "rewards", "reward": "rewards", "loss_type": "algo.loss", "advantage_estimator": "algo.advantage",
    "save_steps": "checkpoint.every_steps", "eval_steps": "evaluate.every_steps", "report_to": "monitor.sinks",
}
"""Words that other frameworks use, to the settings that do the same here. Only hints read it."""

PARTS = ("loop", "sampling", *(n for n, info in Settings.model_fields.items() if info.default in (None, ()) and n != "preset"))
"""Settings at the top that a message may name by one word."""


class SettingsError(ValueError):
    """Settings that cannot be used. `problems` has one line each: file and line (or --set), dotted name, found, what would work."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lead = f"{len(self.problems)} problems in the settings:\n" if len(self.problems) > 1 else ""
        super().__init__(lead + "\n".join(self.problems))


def found(value: Any) -> str:
    """A value in words, short enough for one line."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:57] + '...' if len(value) > 60 else value!r}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"a section with {', '.join(map(str, list(value)[:6])) or 'nothing in it'}"
    return repr(value)[:60]


def explain(error: ValidationError, document: Document) -> list[str]:
    """Each error of pydantic as one line, in the order of the file.

    Branches of a union are told together, and an error inside the list that a branch takes stands for them all.
    """
    grouped: dict[Key, list[dict[str, Any]]] = {}
    for one in error.errors():
        grouped.setdefault(_key(one["loc"]), []).append(one)
    inner = {key[:n] for key in grouped for n in range(len(key))}
    grouped = {key: ones for key, ones in grouped.items() if key not in inner or schema.section_of(schema.place_of(key))}
    lines = [_line(key, ones, document) for key, ones in grouped.items()]
    return [text for _, text in sorted(lines, key=lambda line: line[0])]


def unknown(key: Key) -> str:
    """What to write instead of a name that no setting has."""
    name, place = str(key[-1]), schema.place_of(key[:-1])
    section = schema.section_of(place)
    here = list(section.model_fields) if section else []
    hints = []
    if near := difflib.get_close_matches(name, here, 1):
        hints.append(f"did you mean {dotted((*key[:-1], near[0]))}?")
    at = schema.places().get(name, ())
    if at:
        hints.append(f"{name} stands elsewhere: {' and '.join(at)}")
    elif name in ELSEWHERE:
        hints.append(f"here it is called {ELSEWHERE[name]}")
    elif not near and (far := difflib.get_close_matches(name, schema.places(), 1, 0.75)):
        hints.append(f"did you mean {' or '.join(schema.places()[far[0]])}?")
    if not hints:
        hints.append(f"{dotted(key[:-1]) or 'the top level'} has {', '.join(here)}" if here else "remove it")
    return "there is no such setting; " + "; ".join(hints)


def _key(loc: tuple[str | int, ...]) -> Key:
    """pydantic's location without the labels it puts in for the branches of a union."""
    key: Key = ()
    for i, part in enumerate(loc):
        place = schema.place_of(key)
        if schema.child(place, part) is not None or (i == len(loc) - 1 and schema.section_of(place)):
            key = (*key, part)
    return key


def _line(key: Key, ones: list[dict[str, Any]], document: Document) -> tuple[tuple[int, str], str]:
    origin = document.origin(key)
    kind, message = ones[0]["type"], ones[0]["msg"]
    if kind == "extra_forbidden":
        text = f"{unknown(key)} (found {found(ones[0]['input'])})"
    elif kind == "missing":
        text = _missing(key)
    elif kind == "value_error":
        text = message.removeprefix("Value error, ") + _mentioned(message, key, document)
    else:
        text = _wrong(ones, key)
    name = f"{dotted(key)}: " if key else ""
    return (origin.first or 10**9, str(origin)), f"{origin}: {name}{text}"


def _wrong(ones: list[dict[str, Any]], key: Key) -> str:
    """A value that the setting does not take; `ones` are the errors of the branches of a union, or a single error."""
    value = ones[0]["input"]
    text = f"expected {' or '.join(dict.fromkeys(_expected(one, key) for one in ones))}, found {found(value)}"
    if ones[0]["type"] == "literal_error":
        near = difflib.get_close_matches(str(value), re.findall(r"'([^']+)'", ones[0]["ctx"]["expected"]), 1)
        return text + (f"; did you mean {near[0]}?" if near else "")
    if all(one["type"] == "string_type" for one in ones) and isinstance(value, bool | int | float):
        return f"{text}; put it in quotes"
    if ones[0]["type"] in ("int_type", "float_type") and isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.I):
        return f"{text}; remove the quotes"
    doc = schema.doc_of(key)
    return f"{text}. {dotted(key)}: {' '.join(doc.split())}" if doc and schema.section_of(schema.place_of(key)) is None else text


def _expected(one: dict[str, Any], key: Key) -> str:
    kind, context = one["type"], one.get("ctx", {})
    if kind == "literal_error":
        return context["expected"]
    if kind == "model_type":
        return f"a section with {', '.join(schema.section_of(schema.place_of(key)).model_fields)}"
    if kind in ("too_short", "too_long"):
        return f"at {'least' if kind == 'too_short' else 'most'} {context.get('min_length', context.get('max_length'))} in the list"
    if (base := kind.removesuffix("_type")) in TYPES and base != kind:
        return TYPES[base]
    limit = one["msg"].removeprefix("Input should be ")
    return limit.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _missing(key: Key) -> str:
    place = schema.place_of(key)
    doc = schema.doc_of(key)
    if section := schema.section_of(place):
        needed = [name for name, info in section.model_fields.items() if info.is_required()] or list(section.model_fields)
        return f"this section is required; it has {', '.join(needed)}"
    if isinstance(key[-1], int):
        return "the list is too short"
    if schema.is_list(place) and (section := schema.section_of(schema.child(place, 0))):
        return f"this list is required; each entry has {', '.join(section.model_fields)}"
    return "this setting is required" + (f": {' '.join(doc.split())}" if doc else "")


def _mentioned(message: str, key: Key, document: Document) -> str:
    """The lines of the settings that a message about a pair of them names, and the --set that took part."""
    origins: dict[str, None] = {}
    sections = "|".join(n for n in document.data if n in PARTS) if not key else ""
    named = re.finditer(rf"\b[a-z_]+(?:\.(?:[a-z_]+|\d+))+\b|(?<![.\w])(?:{sections or '(?!)'})(?![.\w])", message)
    for name in dict.fromkeys(one[0] for one in named):
        path = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        if path in document.origins:
            origins[f"{name}: {document.origins[path]}"] = None
    for origin in document.changed_inside(key) if key else ():
        if str(origin) != str(document.origin(key)) and not any(str(origin) in o for o in origins):
            origins[str(origin)] = None
    return f" ({'; '.join(origins)})" if origins else ""
