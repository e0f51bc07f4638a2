import re
from pathlib import Path

from rich.console import Console

from burnish.monitor.measured import lines_of
from burnish.monitor.outcome import show_outcome

BEFORE = {"accuracy_frac": 0.25, "low": 0.1, "high": 0.4, "num_items": 20}
AFTER = {"accuracy_frac": 0.75, "low": 0.6, "high": 0.9, "num_items": 20}
PAIRED = {"difference_frac": 0.5, "low": 0.3, "high": 0.7, "p": 0.00004, "method": "mcnemar exact", "num_items": 20}


def shown(summary) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        show_outcome(summary, Path("runs/x"), console=console)
    return capture.get()


def test_table_examples_and_paths():
    example = {
        "task_id": "1", "prompt": "shot one\nshot two\n3 + 4 =", "answer": "7", "before": "", "after": "7\n\nand on" + "!" * 300,
        "before_reward": None, "after_reward": 1.0,
    }
    text = shown({"steps": 30, "wall_s": 700.0, "before": BEFORE, "after": AFTER, "paired": PAIRED, "examples": [example] * 9})
    for part in ("25.0%", "10.0% to 40.0%", "75.0%", "60.0% to 90.0%", "+50.0", "+30.0 to +70.0", "mcnemar exact", "p < 0.0001"):
        assert part in text, part
    assert text.count("shot two / 3 + 4 =") == 3 and "shot one" not in text
    assert "(nothing)" in text and "not scored" in text and "7 / and" in text
    assert text.count("!") < 3 * 200
    assert "30 steps in 12 min" in text
    assert f"report {Path('runs/x/report.html')}\n" in text and f"model  {Path('runs/x/model')}\n" in text


def test_without_held_out_tasks_and_where_none_could_be_scored():
    assert "accuracy" not in shown({"steps": 3, "wall_s": 1.0})
    assert "no held-out task could be scored" in shown({"before": {"num_items": 0}, "after": AFTER})
    text = shown({"before": BEFORE, "after": {"num_items": 0}})
    assert "25.0%" in text and "not scored" in text


def test_what_was_measured_besides_accuracy():
    measured = {
        "eval/loss_nats": {"before": 2.5, "after": 1.25}, "eval/preference_accuracy_frac": {"before": 0.5, "after": 0.4},
        "eval/own_measure": {"before": 1.0, "after": 2.0}, "eval/accuracy_frac": {"before": 0.1, "after": 0.2},
    }
    text = shown({"steps": 3, "wall_s": 1.0, "measured": measured})
    lines = [line for line in text.splitlines() if "│" in line]
    assert [re.sub(r"[│ ]+", " ", line).strip() for line in lines] == [
        "preference accuracy 50.0% 40.0% -10.0 points", "loss, nats a token 2.5000 1.2500 -1.25", "own measure 1 2 +1",
    ]
    assert "10.0%" not in text and "accuracy" not in shown({"measured": {}})


def test_a_change_for_the_worse_is_red_and_one_without_a_direction_plain():
    better = {line.name: line.better for line in lines_of({
        "eval/loss": {"before": 1.0, "after": 2.0}, "eval/preference_margin": {"before": 1.0, "after": 2.0},
        "eval/score_mean": {"before": 1.0, "after": 2.0}, "eval/loss_nats": {"before": 1.0, "after": 1.0 + 1e-9},
    })}
    assert better == {"eval/loss": False, "eval/preference_margin": True, "eval/score_mean": None, "eval/loss_nats": None}


def test_markup_in_answers_is_text():
    example = {"prompt": "[bold]2[/bold]", "answer": "[red]", "before": "[/]", "after": "[link=x]", "before_reward": 0, "after_reward": 0}
    text = shown({"before": BEFORE, "after": AFTER, "paired": PAIRED, "examples": [example]})
    for part in ("[bold]2[/bold]", "[red]", "[/]", "[link=x]"):
        assert part in text
