"""The report: complete runs, broken runs, hostile texts and very long runs."""

import html.parser
import json
import re

import pytest
from plotly.offline import get_plotlyjs

from burnish.monitor.report import write_report
from burnish.monitor.rollouts import write_rollouts
from burnish.monitor.run_data import read_run, thin
from burnish.monitor.writer import MetricsWriter
from burnish.types import Group, Rollout, Scored, Task, Turn
from tests.make_run import HOSTILE, make_answers_run, make_run


class Page(html.parser.HTMLParser):
    """Tags in order, the text outside scripts and styles, and the page's data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.scripts, self._skip = [], [], [], None
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._skip = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._skip = None

    def handle_data(self, data):
        if self._skip == "script":
            self.scripts[-1] += data
        elif self._skip is None:
            self.words.append(data)


def page_of(run_dir):
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("run"))
    return run_dir, page_of(run_dir)


def test_the_top_says_what_came_out(whole):
    run_dir, page = whole
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    for line in (before, after):
        assert f"{line['accuracy_frac'] * 100:.1f} %" in page.text
        assert f"{line['low'] * 100:.1f} % to {line['high'] * 100:.1f} %" in page.text
    points = (after["accuracy_frac"] - before["accuracy_frac"]) * 100
    assert f"Held-out accuracy rose by {points:.1f} points (95 % interval +47.0 to +63.0)" in page.text
    assert "Paired test on the same 200 items (McNemar's exact test): p = 3.1e\u201124" in page.text
    assert "finished, 60 of 60 steps" in page.text and "arithmetic-grpo" in page.text


def test_curves_hold_the_rows_of_the_run(whole):
    run_dir, page = whole
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert page.data["steps"] == list(range(61)) and page.data["every"] == 1
    for name, values in page.data["series"].items():
        assert values == [None if name not in row else pytest.approx(row[name], rel=1e-5) for row in rows], name
    points = page.data["evals"]
    assert [p["step"] for p in points] == [0, 10, 20, 30, 40, 50, 60]
    assert all(p["low"] < p["accuracy_frac"] < p["high"] and p["num_items"] == 200 for p in points)


def test_failures_are_loud(whole):
    alerts = [attrs["class"] for tag, attrs in whole[1].tags if tag == "p" and "alert" in attrs.get("class", "")]
    assert alerts == ["alert bad"]
    assert "6 training rollouts could not be scored and were not trained on; for example exact: ValueError" in whole[1].text


def test_the_ledger_adds_up_to_all_of_the_time(whole):
    table = whole[1].text.partition("Where the time went")[2].partition("Answers to held-out")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+) %", table)]
    assert shares[-1] == 100.0 and sum(shares[:-1]) == pytest.approx(100, abs=0.3)


def test_rollouts_are_those_of_the_run(whole):
    rollouts = whole[1].data["rollouts"]
    assert {r["where"] for r in rollouts} == {"training", "held-out"}
    steps = [r["step"] for r in rollouts if r["where"] == "training"]
    assert min(steps) == 1 and max(steps) == 60
    assert {"best", "middle", "worst", "failed", "cut off"} <= {r["why"] for r in rollouts}
    talk = next(r for r in rollouts if "tool" in r["task"])
    assert re.fullmatch("p+s+e+s+", talk["who"]) and len(talk["who"]) == len(talk["ids"]) == len(talk["texts"]) == len(talk["logp"])
    assert all(value == 0 for value, who in zip(talk["logp"], talk["who"], strict=True) if who != "s")
    before, after = ({r["task"] for r in rollouts if r["where"] == "held-out" and r["step"] == step} for step in (0, 60))
    assert before == after and before


def test_it_asks_nothing_of_the_network(whole):
    run_dir, page = whole
    assert [attrs for tag, attrs in page.tags if "src" in attrs or (tag == "link") or "://" in attrs.get("href", "")] == []
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert (run_dir / "report.html").stat().st_size < len(get_plotlyjs().encode()) + 1e6


def test_hostile_text_stays_text(tmp_path, whole):
    page = page_of(make_run(tmp_path / "<b>run", hostile=True))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in whole[1].tags], "no text became an element"
    assert " ".join(HOSTILE.split()) in page.text
    assert any(HOSTILE[-12:-2] in "".join(r["texts"]) for r in page.data["rollouts"])


def test_an_empty_folder_and_a_missing_one(tmp_path):
    page = page_of(tmp_path)
    for text in ("no step finished", "holds no evaluation", "no rollouts on disk"):
        assert text in page.text, text
    for file in ("metrics.jsonl", "settings.yaml", "run.json"):
        assert f"{file} is not there" in page.text, file
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_a_run_that_is_still_going(tmp_path):
    run_dir = make_run(tmp_path, steps=25, finished=False)
    with open(run_dir / "metrics.jsonl", "r+b") as file:
        file.truncate(file.seek(0, 2) - 7)
    page = page_of(run_dir)
    assert "not finished: still going, or stopped after step 24 of 25" in page.text
    assert "So far: Held-out accuracy rose by" in page.text and "McNemar's exact test" in page.text
    assert page.data["steps"][-1] == 24 and "before" in page.text and page.data["rollouts"]


def test_a_run_without_evaluations(tmp_path):
    page = page_of(make_run(tmp_path, steps=5, evals=False, finished=False))
    assert "holds no evaluation" in page.text and "There are no two evaluations to compare yet" in page.text
    assert page.data["evals"] == [] and page.data["rollouts"]


def test_a_finished_run_whose_held_out_tasks_could_not_be_scored(tmp_path):
    run_dir = make_run(tmp_path, steps=3, evals=False)
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | {"before": {"num_items": 0}, "after": {"num_items": 0}, "paired": None}))
    page = page_of(run_dir)
    assert "finished, 3 of 3 steps" in page.text and "holds no evaluation" in page.text


def test_items_that_the_paired_test_leaves_out_are_counted(tmp_path):
    run_dir = make_run(tmp_path, steps=3)
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["paired"] |= {"num_missing": 7, "num_items": 193, "low": None, "high": None, "p": 0.3}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = page_of(run_dir)
    assert "the same 193 items" in page.text and "7 items lack a score on one side" in page.text
    assert "p = 0.300, too little evidence to call it a change" in page.text


def test_broken_files_are_named_and_the_rest_is_shown(tmp_path):
    run_dir = make_run(tmp_path, steps=12)
    (run_dir / "rollouts/step-000001.parquet").write_bytes(b"PAR1 torn")
    (run_dir / "evals/step-000000.parquet").write_bytes(b"")
    (run_dir / "settings.yaml").write_text("name: [")
    (run_dir / "summary.json").write_text("{")
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(rows[:4] + rows[7:]))
    page = page_of(run_dir)
    for name in ("rollouts/step-000001.parquet", "evals/step-000000.parquet", "settings.yaml", "summary.json"):
        assert f"{name} cannot be read" in page.text, name
    assert "no row for steps 4 to 6" in page.text
    assert len(page.data["rollouts"]) > 10 and page.data["evals"][0]["low"] is None and page.data["evals"][1]["low"] is not None


def test_a_run_on_written_answers_says_what_was_measured_and_speaks_of_no_rollouts(tmp_path):
    page = page_of(make_answers_run(tmp_path / "run"))
    assert "Held out, before and after before training after training change preference accuracy 50.0% 90.0% +40.0 points" in page.text
    assert "Held-out preference accuracy: 50.0% before training, 90.0% after." in page.text
    assert "loss 0.7000 0.5000 -0.2" in page.text and "implied reward, rejected 0.0000 -0.2000 -0.2" in page.text
    classes = [attrs.get("class") for tag, attrs in page.tags if tag == "td" and attrs.get("class") in ("better", "worse")]
    assert classes == ["better"] * 3        # accuracy, loss, margin; the rewards of one side are neither
    for part in ("method preference", "loss sigmoid(beta=0.1)", "a step 8 written answers", "answers jsonl_pairs", "400 / 40"):
        assert part in page.text, part
    assert "No update was skipped, and no answer was left out." in page.text
    ids = {attrs.get("id") for _, attrs in page.tags}
    assert {"result", "curves", "time", "settings"} <= ids and not {"rollouts", "answers", "list"} & ids
    assert not {"#rollouts", "#answers"} & {attrs.get("href") for tag, attrs in page.tags if tag == "a"}
    for word in ("rollout", "on disk", "accuracy was", "is not there"):
        assert word not in page.text.replace("rollouts need JavaScript", ""), word


def test_a_run_on_written_answers_that_is_still_going_or_measured_nothing(tmp_path):
    page = page_of(make_answers_run(tmp_path / "going", steps=25, finished=False))
    assert "preference accuracy 50.0% 82.0% +32.0 points" in page.text and "step 0 step 20 change" in page.text
    assert "before training" not in page.text.partition("Curves")[0].replace("Held out, before and after", "")
    page = page_of(make_answers_run(tmp_path / "blind", evals=False))
    assert "holds no evaluation, so nothing can be said about what was held out" in page.text


def test_measures_beside_accuracy_stand_below_it(tmp_path):
    run_dir = make_run(tmp_path, steps=12)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"eval/divergence_nats": 1 / (1 + row["step"])} if "eval/accuracy_frac" in row else {}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(run_dir)
    assert "Held-out accuracy accuracy 95 % interval" in page.text
    assert "Other measures before training after training change divergence from the teachers, nats a token 1.0000 0.0769" in page.text


def test_a_small_effective_sample_size_is_told(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0, "train/correction_ess_frac": 0.2})
    assert "effective sample size is 20.0 % of the tokens" in page_of(tmp_path).text


def test_numbers_that_are_none_are_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": float("nan"), "train/lr": 1.0, "train/skipped_updates_count": 2})
        writer.write(2, {"train/loss": float("inf"), "train/lr": 1.0})
    page = page_of(tmp_path)
    assert "train/loss was NaN or infinite in 2 steps" in page.text
    assert "2 updates were skipped because the loss or gradient was not finite" in page.text


def test_a_long_run_makes_a_small_page(tmp_path):
    """Many steps, and rollouts of 5,000 tokens: the page stays within 3 MB of plotly's own size, and says what it left out."""
    run_dir = make_run(tmp_path, steps=1300, rollouts_every=10**9, evals=False)
    for step in range(1, 1301, 100):
        _long_rollouts(run_dir, step)
    path = write_report(run_dir)
    page = Page(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < len(get_plotlyjs().encode()) + 3e6
    assert page.data["every"] == 3 and len(page.data["steps"]) == 434 and page.data["steps"][-1] == 1300
    rollout = page.data["rollouts"][0]
    assert rollout["num_tokens"] == 5200 and len(rollout["ids"]) == 700 and rollout["left_out"] == 4500
    assert rollout["ids"][0] > 0 and rollout["who"][0] == "p" and "s" in rollout["who"][:350] and rollout["ids"][-1] == 5199


def _long_rollouts(run_dir, step):
    task = Task("long", "p" * 20_000)
    n, m = 200, 5000
    rollout = Rollout(
        task, 0, tuple(range(n + m)), (False,) * n + (True,) * m, (0.0,) * n + (-1.23456789,) * m,
        (Turn("prompt", 0, n, "p"), Turn("policy", n, n + m, "x" * 20_000)), "max_tokens", step,
    )
    group = Group(task, tuple(Scored(rollout, float(i), {"exact": float(i)}) for i in range(4)))
    write_rollouts(run_dir / f"rollouts/step-{step:06d}.parquet", step, [group], lambda token: f"word{token} ")


def test_thinning_joins_by_the_reduction_of_each_metric():
    rows = [{"step": n, "train/loss": float(n), "train/grad_norm": float(n % 3), "train/lr": float(n), "not_finite": []} for n in range(10)]
    rows[1].pop("train/loss")
    thinned, every = thin(rows, most=5)
    assert every == 2 and [row["step"] for row in thinned] == [1, 3, 5, 7, 9]
    assert thinned[0] == {"step": 1, "train/loss": 0.0, "train/grad_norm": 1.0, "train/lr": 1.0}
    assert thinned[1] == {"step": 3, "train/loss": 2.5, "train/grad_norm": 2.0, "train/lr": 3.0}
    assert thin(rows, most=10) == (rows, 1)


def test_the_report_reads_only(tmp_path):
    run_dir = make_run(tmp_path, steps=3)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    read_run(run_dir)
    write_report(run_dir)
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != "report.html"} == before
