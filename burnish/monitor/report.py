"""report.html: everything about a run in one file that opens from disk, without network or server."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from burnish.config.settings import METHODS
from burnish.monitor.ledger import total
from burnish.monitor.live import duration
from burnish.monitor.measured import lines_of, sentence
from burnish.monitor.metrics import metric
from burnish.monitor.run_data import RunData, makes_rollouts, names, read_run, thin
from burnish.monitor.writer import write_atomic

_PAGE = Path(__file__).parent / "page"
_METHODS = {"mcnemar exact": "McNemar's exact test"}
_PHASES = ("generate", "reward", "train", "evaluate", "checkpoint")
# What is loud: (metric, words for one or many, colour)
_FAILURES = (
    ("rollout/not_scored_count", "training rollouts could not be scored and were not trained on", "bad"),
    ("eval/not_scored_count", "held-out samples could not be scored", "bad"),
    ("train/skipped_updates_count", "updates were skipped because the loss or gradient was not finite", "bad"),
    ("rollout/dropped_rollouts_count", "rollouts were left out of the update", "warn"),
    ("train/too_long_count", "answers were longer than data.max_tokens or the context, and were left out", "warn"),
)


def write_report(run_dir: Path | str) -> Path:
    """Read RUN and write RUN/report.html; returns its path. Works on finished, running and crashed runs.

    What is missing is said on the page. The file is about 1 to 3 MB larger than plotly's JavaScript, however long the run.
    """
    data = read_run(Path(run_dir))
    path = data.run_dir / "report.html"
    write_atomic(path, render(data).encode("utf-8", errors="replace"))
    return path


def render(data: RunData) -> str:
    """The page as HTML text."""
    plotly, script = _script(get_plotlyjs()), _script((_PAGE / "report.js").read_text(encoding="utf-8"))
    env = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {"pct": _pct, "num": _num, "duration": duration}
    return env.get_template("report.html.j2").render(
        name=data.settings.get("name") or (data.summary or {}).get("name") or data.run_dir.resolve().name,
        about=data.settings.get("about", ""),
        state=_state(data),
        facts=_facts(data),
        result=_result(data),
        measured=_measured(data),
        answers_tasks=makes_rollouts(data.settings) or bool(data.evals),
        makes_rollouts=makes_rollouts(data.settings) or bool(data.rollouts),
        alerts=_alerts(data),
        ledger=_ledger(data),
        examples=data.examples,
        success_reward=data.success_reward,
        settings_text=data.settings_text,
        run_text=json.dumps(data.run, indent=2, ensure_ascii=False) if data.run else "",
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        css=Markup((_PAGE / "report.css").read_text(encoding="utf-8")),
        plotly=Markup(plotly),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {_hash(plotly)} {_hash(script)}",
        page_data=_embed(_page_data(data)),
    )


def _page_data(data: RunData) -> dict[str, Any]:
    rows, every = thin(data.rows)
    return {
        "every": every,
        "loop": data.settings.get("loop", "sync"),
        "series": {name: [_short(row.get(name)) for row in rows] for name in names(rows)},
        "steps": [row["step"] for row in rows],
        "evals": [asdict(point) for point in data.evals],
        "metrics": {name: _declared(name) for name in names(rows)},
        "success_reward": data.success_reward,
        "rollouts": data.rollouts,
    }


def _declared(name: str) -> dict[str, str]:
    try:
        found = metric(name)
    except KeyError:        # of a run of another version
        return {"meaning": "", "unit": ""}
    return {"meaning": found.meaning, "unit": found.unit}


def _embed(value: Any) -> Markup:
    """JSON that can stand inside a script element: nothing in it can close the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _script(text: str) -> str:
    """As the browser will see it, so that its hash fits; refuses a text that would end its own element."""
    text = text.replace("\r\n", "\n")
    if "</script" in text.lower():
        raise ValueError("a script for the report contains </script, which would end its element")
    return text


def _hash(script: str) -> str:
    """The page runs these scripts only, whatever a model wrote into it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _state(data: RunData) -> dict[str, str]:
    last = data.rows[-1]["step"] if data.rows else None
    planned = data.settings.get("train", {}).get("steps")
    of = f" of {planned}" if planned else ""
    if data.summary is not None:
        return {"tone": "good", "text": f"finished, {last}{of} steps" if last is not None else "finished"}
    if last is None:
        return {"tone": "bad", "text": "no step finished"}
    return {"tone": "warn", "text": f"not finished: still going, or stopped after step {last}{of}"}


def _facts(data: RunData) -> list[tuple[str, str]]:
    settings, run, summary = data.settings, data.run, data.summary or {}
    train, model = settings.get("train", {}), settings.get("model", {})
    method = next((settings[name] for name in METHODS if settings.get(name)), {})
    teachers = (settings.get("distill") or {}).get("teachers", [])
    facts: list[tuple[str, Any]] = [
        ("model", run.get("model") or model.get("path") or _scratch(model)),
        ("parameters", _parameters(run)),
        ("adapters", f"LoRA, rank {model['lora'].get('rank', '?')}" if model.get("lora") else None),
        ("tasks", _ref((settings.get("tasks") or {}).get("source"))),
        ("answers", _ref((settings.get("data") or {}).get("source"))),
        ("environments", ", ".join(place.get("name", "?") for place in settings.get("environments") or [])),
        ("train / held out", f"{run['train_tasks']:,} / {run['held_out_tasks']:,}" if "train_tasks" in run else None),
        ("rewards", ", ".join(filter(None, (_ref(reward.get("fn")) for reward in settings.get("rewards") or [])))),
        ("method", settings.get("preset") or (settings["loop"].replace("_", " ") if settings.get("loop", "sync") != "sync" else None)),
        ("loss", _ref(method.get("loss") or method.get("divergence"))
         or ", ".join(filter(None, (_ref(term.get("fn")) for term in method.get("losses", []))))),
        ("teachers", ", ".join(_scratch(t["model"]) or t["model"].get("path") or "?" for t in teachers)),
        ("advantage", _ref(method.get("advantage"))),
        ("a step", _a_step(train)),
        ("learning rate", settings.get("optim", {}).get("lr")),
        ("seed", settings.get("seed")),
        ("device", run.get("device")),
        ("wall time", duration(summary["wall_s"]) if "wall_s" in summary else None),
        ("memory", _memory(data.rows)),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _parameters(run: Mapping[str, Any]) -> str | None:
    if not isinstance(every := run.get("parameters"), int):
        return None
    trained = run.get("trained_parameters", every)
    return f"{every:,}" if trained == every else f"{every:,}, {trained:,} of them trained"


def _scratch(model: Mapping[str, Any]) -> str | None:
    scratch = model.get("scratch")
    return f"a small {scratch.get('model_type', 'transformer')} with random weights" if scratch else None


def _ref(raw: Any) -> str | None:
    """A reference as people read it: its last name and its values."""
    if raw is None:
        return None
    path = raw.get("ref", "") if isinstance(raw, Mapping) else str(raw)
    values = {k: v for k, v in raw.items() if k != "ref"} if isinstance(raw, Mapping) else {}
    text = f"{path.rpartition(':')[2]}({', '.join(f'{k}={v}' for k, v in values.items())})" if values else path.rpartition(":")[2]
    return text if len(text) <= 120 else text[:117] + "..."


def _a_step(train: Mapping[str, Any]) -> str | None:
    if train.get("examples_per_step"):
        return f"{train['examples_per_step']} written answers"
    if not train.get("prompts_per_step") or not train.get("samples_per_prompt"):
        return None
    return f"{train['prompts_per_step']} prompts x {train['samples_per_prompt']} samples"


def _memory(rows: Sequence[Mapping[str, Any]]) -> str | None:
    peaks = [row["memory/peak_gib"] for row in rows if "memory/peak_gib" in row]
    return f"{max(peaks):.2f} GiB at most" if peaks else None


def _result(data: RunData) -> dict[str, Any] | None:
    """The table at the top: of the summary, or so far from the evaluations that took place."""
    summary = data.summary or {}
    if all("accuracy_frac" in (summary.get(when) or {}) for when in ("before", "after")):
        return {
            "lines": [("before training", summary["before"]), ("after training", summary["after"])],
            "sentence": _sentence(summary["paired"]) if summary.get("paired") else "There was no paired test.",
            "tone": _tone(summary.get("paired")),
        }
    if not data.evals:
        return None
    first, last = data.evals[0], data.evals[-1]
    return {
        "lines": [(f"step {point.step}", asdict(point)) for point in dict.fromkeys((first, last))],
        "sentence": f"So far: {_sentence(data.paired)}" if data.paired else "Two evaluations are needed for a comparison.",
        "tone": _tone(data.paired),
    }


def _measured(data: RunData) -> dict[str, Any] | None:
    """The table of what was measured on held-out data besides answers to tasks."""
    if data.measured is None or not (lines := lines_of(data.measured.metrics)):
        return None
    done = data.summary is not None
    first, last = ("before training", "after training") if done else (f"step {step}" for step in data.measured.steps)
    tone = {None: "plain", True: "good", False: "bad"}[lines[0].better]
    return {"first": first, "last": last, "lines": lines, "sentence": sentence(lines[0]) if done else "", "tone": tone}


def _sentence(paired: Mapping[str, Any]) -> str:
    """The paired test in words."""
    difference, p = paired["difference_frac"], paired["p"]
    moved = "rose" if difference > 0 else "fell" if difference < 0 else "did not change"
    by = f" by {abs(difference) * 100:.1f} points" if difference else ""
    bounds = f" (95 % interval {paired['low'] * 100:+.1f} to {paired['high'] * 100:+.1f})" if paired.get("low") is not None else ""
    if p < 0.01:
        reading = "a difference this large would be very unlikely if training had changed nothing"
    elif p < 0.05:
        reading = "some evidence of a change, not a strong one"
    else:
        reading = "too little evidence to call it a change; more items would tell"
    left_out = f" {paired['num_missing']} items lack a score on one side and are left out." if paired.get("num_missing") else ""
    method = _METHODS.get(paired["method"], paired["method"])
    test = f"Paired test on the same {paired['num_items']} items ({method}): p = {_p(p)}, {reading}."
    return f"Held-out accuracy {moved}{by}{bounds}. {test}{left_out}"


def _tone(paired: Mapping[str, Any] | None) -> str:
    if not paired or paired["p"] >= 0.05:
        return "plain"
    return "good" if paired["difference_frac"] > 0 else "bad"


def _alerts(data: RunData) -> list[tuple[str, str]]:
    """(tone, sentence) of everything that went wrong or wants a look; loud first."""
    rows = data.rows
    alerts = [("bad", f"{int(count):,} {words}{_reasons(data) if name == 'rollout/not_scored_count' else ''}.")
              if tone == "bad" else (tone, f"{int(count):,} {words}.")
              for name, words, tone in _FAILURES if (count := _sum(rows, name))]
    broken = Counter(name for row in rows for name in row.get("not_finite", ()))
    alerts += [("bad", f"{name} was NaN or infinite in {count} steps; those points are missing.") for name, count in broken.items()]
    if missing := _gaps(rows):
        alerts.append(("bad", f"metrics.jsonl has no row for steps {missing}."))
    for name, limit, words in (
        ("rollout/constant_groups_frac", 0.5, "of the groups had equal rewards for all samples, which teach nothing"),
        ("rollout/truncated_frac", 0.2, "of the training rollouts were cut off before the policy ended them"),
    ):
        if (share := _mean(rows, name)) is not None and share > limit:
            alerts.append(("warn", f"{_pct(share)} {words}."))
    if (size := _mean(rows, "train/correction_ess_frac")) is not None and size < 0.5:
        alerts.append(("warn", f"The correction's effective sample size is {_pct(size)} of the tokens; a few of them weigh most."))
    if (gap := _mean(rows, "train/kl_cur_gen_nats")) is not None and abs(gap) > 0.01:
        alerts.append(("warn", f"Trainer and sampler disagree by {gap:.3f} nats a token on average; below 0.01 is usual."))
    alerts += [("warn", f"{problem}.") for problem in data.problems]
    return sorted(alerts, key=lambda alert: alert[0] != "bad")


def _reasons(data: RunData) -> str:
    """The errors met most often among the rollouts on this page."""
    seen = Counter(f"{name}: {text}" for rollout in data.rollouts for name, text in rollout["errors"].items())
    return f"; for example {seen.most_common(1)[0][0][:200]}" if seen else ""


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return math.fsum(row.get(name, 0) for row in rows)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return math.fsum(values) / len(values) if values else None


def _gaps(rows: Sequence[Mapping[str, Any]]) -> str:
    gaps = [(a["step"] + 1, b["step"] - 1) for a, b in itertools.pairwise(rows) if b["step"] > a["step"] + 1]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in gaps[:5])


def _ledger(data: RunData) -> list[dict[str, Any]]:
    """Phases with seconds and their share of all time; the shares add up to 100 %."""
    seconds = total(row for row in data.rows)
    seconds.pop("step", None)
    whole = math.fsum(seconds.values())
    if not whole:
        return []
    known = {phase: i for i, phase in enumerate(_PHASES)}
    order = sorted(seconds, key=lambda phase: (phase == "other", known.get(phase, len(known))))
    return [{"phase": phase, "seconds": seconds[phase], "share": seconds[phase] / whole} for phase in order]


def _short(value: Any) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _num(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}".replace("-", "\u2011")   # does not break across lines
