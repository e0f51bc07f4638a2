"""What is measured on held-out data besides accuracy: how it is called, written and read, and how it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ANSWERING = ("eval/accuracy_frac", "eval/reward_mean", "eval/sampled_tokens_mean", "eval/not_scored_count")
"""Metrics of answers to held-out tasks, which have a table and intervals of their own."""

# name -> label, how it is written, whether more is better (None: neither); the first that a run has is what it is judged by
SHOWN: dict[str, tuple[str, str, bool | None]] = {
    "eval/preference_accuracy_frac": ("preference accuracy", "{:.1%}", True),
    "eval/step_accuracy_frac": ("accuracy of steps", "{:.1%}", True),
    "eval/label_accuracy_frac": ("accuracy of classes", "{:.1%}", True),
    "eval/rating_error_mean": ("distance to the rating", "{:.4g}", False),
    "eval/divergence_nats": ("divergence from the teachers, nats a token", "{:.4f}", False),
    "eval/loss_nats": ("loss, nats a token", "{:.4f}", False),
    "eval/loss": ("loss", "{:.4f}", False),
    "eval/preference_margin": ("margin of implied rewards", "{:.4f}", True),
    "eval/reward_chosen_mean": ("implied reward, chosen", "{:.4f}", None),
    "eval/reward_rejected_mean": ("implied reward, rejected", "{:.4f}", None),
    "eval/score_chosen_mean": ("score, chosen", "{:.4f}", None),
    "eval/score_rejected_mean": ("score, rejected", "{:.4f}", None),
    "eval/score_mean": ("score", "{:.4f}", None),
    "eval/logp_chosen_nats": ("log-prob of the answer, chosen, nats", "{:.2f}", None),
    "eval/logp_rejected_nats": ("log-prob of the answer, rejected, nats", "{:.2f}", None),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One metric before and after training, in words. better: None where neither direction is, or where nothing changed."""

    name: str
    label: str
    before: str
    after: str
    change: str
    better: bool | None


def lines_of(measured: Mapping[str, Mapping[str, float]]) -> list[Line]:
    """The lines of a summary's `measured`, without those of answers to tasks; what a run is judged by comes first."""
    names = [name for name in SHOWN if name in measured]
    names += [name for name in measured if name.startswith("eval/") and name not in (*ANSWERING, *SHOWN)]
    return [_line(name, measured[name]["before"], measured[name]["after"]) for name in names]


def judged_by(metrics: Mapping[str, float]) -> tuple[str, str] | None:
    """Short label and value of what a run without answers to tasks is judged by, where these metrics have it."""
    name = next((name for name in SHOWN if name in metrics), None)
    return (label_of(name).partition(",")[0], written(name, metrics[name])) if name is not None else None


def label_of(name: str) -> str:
    return SHOWN[name][0] if name in SHOWN else name.removeprefix("eval/").replace("_", " ")


def written(name: str, value: float) -> str:
    text = (SHOWN[name][1] if name in SHOWN else "{:.4g}").format(value)
    return text if text.strip("-0.%") else text.removeprefix("-")


def sentence(line: Line) -> str:
    """The change in words."""
    if line.before == line.after:
        return f"Held-out {line.label}: {line.after}, as before training."
    return f"Held-out {line.label}: {line.before} before training, {line.after} after."


def _line(name: str, before: float, after: float) -> Line:
    texts = written(name, before), written(name, after)
    more = SHOWN[name][2] if name in SHOWN else None
    change = f"{100 * (after - before):+.1f} points" if "%" in texts[0] else f"{after - before:+.4g}"
    return Line(name, label_of(name), *texts, change, None if more is None or texts[0] == texts[1] else (after > before) == more)
