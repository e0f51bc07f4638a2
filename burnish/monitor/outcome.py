"""What a finished run reached, for the terminal: what was held out before and after, sample answers, where things lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from burnish.monitor.live import duration
from burnish.monitor.measured import Line, lines_of

SHOWN_EXAMPLES = 3
SHOWN_CHARS = 200


def show_outcome(summary: Mapping[str, Any], folder: Path, *, console: Console | None = None) -> None:
    """Print a run's summary (the content of summary.json). Where nothing was held out only the paths are shown."""
    console = console or Console(highlight=False)
    measured = lines_of(summary.get("measured", {}))
    if measured:
        console.print()
        console.print(_measured(measured))
    if summary.get("before", {}).get("num_items"):
        console.print()
        console.print(_table(summary))
        for example in summary.get("examples", ())[:SHOWN_EXAMPLES]:
            console.print(_example(example))
    elif "before" in summary:
        console.print("\nno held-out task could be scored; the report says why")
    console.print()
    if "wall_s" in summary:
        console.print(f"{summary.get('steps', '?')} steps in {duration(summary['wall_s'])}")
    for label, path in (("report", folder / "report.html"), ("model", folder / "model")):
        console.print(Text(f"{label:<7}{path}"), soft_wrap=True)


def _measured(lines: Sequence[Line]) -> Table:
    table = Table(title="held out", title_justify="left", title_style="bold")
    for column in ("", "before training", "after training", "change"):
        table.add_column(column, justify="left" if not column else "right")
    for line in lines:
        style = "" if line.better is None else "green" if line.better else "red"
        table.add_row(line.label, line.before, Text(line.after, style="bold"), Text(line.change, style=style))
    return table


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(title="held-out accuracy", title_justify="left", title_style="bold")
    for column in ("", "accuracy", "95 % interval", "items"):
        table.add_column(column, justify="left" if not column else "right")
    for when in ("before", "after"):
        row = summary[when]
        if row.get("num_items"):
            interval = "" if row["low"] is None else f"{row['low']:.1%} to {row['high']:.1%}"
            table.add_row(f"{when} training", Text(f"{row['accuracy_frac']:.1%}", style="bold"), interval, str(row["num_items"]))
        else:
            table.add_row(f"{when} training", "not scored", "", "0")
    if paired := summary.get("paired"):
        table.add_section()
        interval = "" if paired["low"] is None else f"{100 * paired['low']:+.1f} to {100 * paired['high']:+.1f}"
        table.add_row("difference, points", f"{100 * paired['difference_frac']:+.1f}", interval, str(paired["num_items"]))
        table.caption = f"paired test ({paired['method']}): p {_p(paired['p'])}"
        table.caption_justify = "left"
    return table


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"= {p:.4f}" if p < 0.1 else f"= {p:.2f}"


def _example(example: Mapping[str, Any]) -> RenderableType:
    prompt = str(example.get("prompt", "")).strip()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(_cut(prompt, from_end=True)))
    if example.get("answer") is not None:
        grid.add_row("wanted", Text(_cut(str(example["answer"]))))
    for when in ("before", "after"):
        reward = example.get(f"{when}_reward")
        mark = "not scored" if reward is None else f"reward {reward:g}"
        grid.add_row(when, Text.assemble(_cut(str(example.get(when, ""))) or "(nothing)", (f"   {mark}", "dim")))
    return Group(Text(""), grid)


def _cut(text: str, *, from_end: bool = False) -> str:
    """One short line; of a prompt its end, where the question stands."""
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    if from_end and lines:
        lines = lines[-2:]
    text = " / ".join(lines)
    if len(text) <= SHOWN_CHARS:
        return text
    return "..." + text[-SHOWN_CHARS:] if from_end else text[:SHOWN_CHARS] + "..."
