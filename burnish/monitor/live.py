"""What a run is doing, while it runs: a live view on a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live as RichLive
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burnish.monitor.measured import SHOWN, judged_by

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 400
_RATE_WINDOW_STEPS = 20

# name, label, how it is written, whether more is better (None: neither)
_SHOWN = (
    ("rollout/reward_mean", "reward", "{:.3f}", True),
    ("rollout/success_frac", "success", "{:.1%}", True),
    ("eval/accuracy_frac", "held-out accuracy", "{:.1%}", True),
    *((name, f"held-out {label}", form, better) for name, (label, form, better) in SHOWN.items() if better is not None),
    ("train/loss", "loss", "{:.4f}", False),
    ("train/preference_accuracy_frac", "preference accuracy", "{:.1%}", True),
    ("train/kl_cur_ref_nats", "KL to start, nats", "{:.4f}", None),
    ("train/entropy_nats", "entropy, nats", "{:.3f}", None),
    ("rollout/sampled_tokens_mean", "length, tokens", "{:.1f}", None),
    ("train/grad_norm", "gradient norm", "{:.3g}", None),
    ("train/lr", "learning rate", "{:.2e}", None),
    ("train/kl_cur_gen_nats", "trainer vs sampler, nats", "{:.1e}", None),
    ("rate/generate_tokens_per_s", "generating, tokens/s", "{:.0f}", None),
    ("rate/train_tokens_per_s", "training, tokens/s", "{:.0f}", None),
    ("memory/peak_gib", "memory, GiB", "{:.2f}", None),
)
_PLAIN = {
    "rollout/reward_mean": "reward",
    "rollout/success_frac": "success",
    "eval/accuracy_frac": "accuracy",
    "train/kl_cur_ref_nats": "KL",
    "rate/generate_tokens_per_s": "tokens/s",
}
# shown where there are no rewards
_WITHOUT_ROLLOUTS = {"train/loss": "loss", "train/preference_accuracy_frac": "in order"}
_LOUD = {
    "rollout/not_scored_count": "not scored",
    "eval/not_scored_count": "held-out not scored",
    "train/skipped_updates_count": "updates skipped",
    "rollout/dropped_rollouts_count": "dropped",
}
_FORMATS = {name: form for name, _, form, _ in _SHOWN}


class Live:
    """Context manager around a run. Exceptions pass through, and the terminal is as it was before.

    total_steps: steps of the whole run; start_step: steps done before this process began (a resumed run).
    file: where to write, standard output by default. terminal: None asks the file.
    """

    def __init__(
        self, total_steps: int, *, name: str = "", start_step: int = 0, file: TextIO | None = None, terminal: bool | None = None
    ) -> None:
        self._console = Console(file=file or sys.stdout, highlight=False, force_terminal=terminal)
        self.rich = self._console.is_terminal and not self._console.is_dumb_terminal and _can_write(self._console, _BARS)
        self._total, self._name, self._step = total_steps, name, start_step
        self._history: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}
        self._status: tuple[str, int | None, int | None] = ("starting", None, None)
        self._ticks: deque[float] = deque([time.monotonic()], maxlen=_RATE_WINDOW_STEPS + 1)
        self._live: RichLive | None = None

    def __enter__(self) -> Live:
        self._ticks[-1] = time.monotonic()
        if self.rich:
            self._live = RichLive(get_renderable=self._view, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._status = ("", None, None)
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done (0: the state before training), with these metrics."""
        if step > self._step:
            self._ticks.append(time.monotonic())
        else:
            self._ticks[-1] = time.monotonic()
        self._step = step
        for name, value in metrics.items():
            self._history.setdefault(name, deque(maxlen=_HISTORY)).append(value)
            if name in _LOUD:
                self._counts[name] = self._counts.get(name, 0) + int(value)
        if self._live is not None:
            self._live.refresh()
        elif not self.rich:
            self._console.print(Text(self._line(metrics)), soft_wrap=True)

    def status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """What happens now, as ("generating", 12, 64). Cheap: the screen is drawn four times a second, whatever the calls."""
        self._status = (text, done, total)

    def note(self, text: str) -> None:
        """A line that stays, as a warning or a path."""
        self._console.print(Text(text), soft_wrap=True)

    def _seconds_left(self) -> float | None:
        steps = len(self._ticks) - 1
        span = self._ticks[-1] - self._ticks[0]
        left = self._total - self._step
        return None if steps < 1 or span <= 0 or left <= 0 else left * span / steps

    def _line(self, metrics: Mapping[str, float]) -> str:
        parts = [f"step {self._step}/{self._total}"]
        plain = _PLAIN if "rollout/reward_mean" in metrics else _WITHOUT_ROLLOUTS | _PLAIN
        parts += [f"{label} {_number(name, metrics[name])}" for name, label in plain.items() if name in metrics]
        if held_out := judged_by(metrics):
            parts.append("held-out {} {}".format(*held_out))
        parts += [f"{label.upper()} {int(metrics[name])}" for name, label in _LOUD.items() if metrics.get(name)]
        if "time/step_s" in metrics:
            parts.append(f"{metrics['time/step_s']:.1f} s")
        if (left := self._seconds_left()) is not None:
            parts.append(f"left {duration(left)}")
        return "  ".join(parts)

    def _view(self) -> RenderableType:
        return Panel(Group(self._progress(), self._now(), self._table(), *self._failures()), title=self._name or None, title_align="left")

    def _progress(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        text = f"step {self._step}/{self._total}"
        steps, span = len(self._ticks) - 1, self._ticks[-1] - self._ticks[0]
        rate = f"{span / steps:.1f} s a step" if steps and span > 0 and self._step else ""
        left = self._seconds_left()
        grid.add_row(text, ProgressBar(self._total, self._step, width=30), rate, "" if left is None else f"left {duration(left)}")
        return grid

    def _now(self) -> RenderableType:
        text, done, total = self._status
        if total is None:
            return Text(text, style="dim")
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text(f"{text} {done}/{total}", style="dim"), ProgressBar(total, done or 0, width=20, complete_style="cyan"))
        return grid

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, label, _, more_is_better in _SHOWN:
            values = [v for v in self._history.get(name, ()) if math.isfinite(v)]
            if values and not (name in _WITHOUT_ROLLOUTS and "rollout/reward_mean" in self._history):
                line = sparkline(values) if more_is_better is not None else ""
                grid.add_row(label, Text(_number(name, values[-1]), style="bold"), _arrow(values, more_is_better), Text(line, style="cyan"))
        return grid

    def _failures(self) -> list[Text]:
        return [Text(f"{label}: {self._counts[n]}", style="bold red") for n, label in _LOUD.items() if self._counts.get(n)]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve in `width` characters at most; neighbouring values are averaged."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for i in range(width):
        part = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * width
    return "".join(_BARS[min(7, int((m - low) / (high - low) * 8))] for m in means)


def duration(seconds: float) -> str:
    """Seconds as people say them: 4.5 s, 45 s, 12 min, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _number(name: str, value: float) -> str:
    return _FORMATS.get(name, "{:.4g}").format(value)


def _arrow(values: Sequence[float], more_is_better: bool | None) -> Text:
    """The newest values against those before them."""
    half = min(5, len(values) // 2)
    if not half:
        return Text(" ")
    newest, before = sum(values[-half:]) / half, sum(values[-2 * half : -half]) / half
    if abs(newest - before) <= 1e-3 * max(abs(newest), abs(before)):
        return Text("=", style="dim")
    up = newest > before
    style = "dim" if more_is_better is None else ("green" if up == more_is_better else "red")
    return Text("▲" if up else "▼", style=style)


def _can_write(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
