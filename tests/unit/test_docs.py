"""docs/: tables are those of the code, nothing of the library goes unnamed, links lead somewhere, YAML loads."""

from __future__ import annotations

import copy
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML
from tiny import TINY

import burnish.algorithms
from burnish.config.load import load_recipe
from burnish.config.presets import PRESETS
from burnish.config.settings import METHODS
from burnish.engines import named
from burnish.plan.preflight import check
from burnish.rewards.call import read
from docs import tables

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in tables.pages()}
LIBRARY = "\n".join(text for name, text in PAGES.items() if "algorithms/" in name)
CODE = "\n".join(re.findall(r"```.*?```|`[^`]*`", tables.TABLE.sub("", LIBRARY), re.S))
ROOMS = [module.name for module in pkgutil.iter_modules(burnish.algorithms.__path__) if tables.functions_of(module.name)]
SECTIONS = (
    *METHODS, "algo.kl", "algo.correction", "algo.entropy", "critic", "constraint", "preference.losses.0", "distill.teachers.0", "data",
    "train", "sampling",
)
BLOCK = re.compile(r"(?:<!-- (\w+): ?([\w./]*) -->\n)?```(\w+)\n(.*?)```", re.S)
BLOCKS = [(name, *m.groups("")) for name, text in PAGES.items() for m in BLOCK.finditer(text)]
SHOWN = [block for block in BLOCKS if block[3] == "yaml"]
ANSWERS = '''
from burnish.types import Example, Pair

def pairs():
    return [Pair(str(n), f"{n}>", str(n), str(n + 1)) for n in range(20)]

def examples():
    return [Example(str(n), f"{n}>", str(n)) for n in range(20)]
'''
WRITTEN = {"train": {"steps": 2, "examples_per_step": 4}, "tasks": None, "rewards": [], "sampling": None}
CHANGES = {
    "sync": {},
    "environments": {"tasks": None, "rewards": None},
    "preference": WRITTEN | {"data": {"source": "answers.py:pairs"}}, "reward_model": WRITTEN | {"data": {"source": "answers.py:pairs"}},
    "reward_model_of_steps": WRITTEN,
    "sft": WRITTEN | {"data": {"source": "answers.py:examples"}},
    "distill": {k: v for k, v in WRITTEN.items() if k != "sampling"} | {"data": {"source": "answers.py:examples"}},
}
"""The recipe that a fragment stands in: tests/tiny.py without a method, with these sections in place of its own."""


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_code(name):
    assert tables.renewed(PAGES[name]) == PAGES[name], "stale; write it anew by: python -m docs.tables --write"


def test_a_stale_table_is_found():
    page = PAGES["docs/algorithms/README.md"]
    changed = page.replace("| `grpo` |", "| `gpro` |")
    assert changed != page and tables.renewed(changed) == tables.renewed(page) != changed
    assert tables.renewed("<!-- table: functions token_losses -->\n<!-- end -->").count("\n| `") == 2


@pytest.mark.parametrize("kind, name", [
    *(("functions", room) for room in ROOMS), *(("settings", section) for section in SECTIONS), ("presets", ""),
    *(("engine", name) for name in named.__all__), ("abilities", ""),
])
def test_each_has_its_table(kind, name):
    assert f"<!-- table: {' '.join([kind, *filter(None, [name])])} -->" in "\n".join(PAGES.values())


@pytest.mark.parametrize("room", ROOMS)
def test_every_function_is_spoken_of(room):
    """Beside its row in a table, with a word on what it is for."""
    assert [name for name in tables.functions_of(room) if not re.search(rf"\b{name}\b", CODE)] == []


def test_every_preset_is_named():
    assert [name for name in PRESETS if f"`{name}`" not in LIBRARY] == []


def test_what_the_guide_begins_with_is_there():
    guide = PAGES["docs/algorithms/README.md"].partition("## What do you have?")[2].partition("\n## ")[0]
    names = [name for row in guide.splitlines() if row.startswith("|") for name in re.findall(r"`([^`]+)`", row.split("|")[2])]
    assert len(names) > 10 and [name for name in names if name not in PRESETS and not name.startswith("loop: ")] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_tells_what_it_is_for(section):
    rows = list(tables.KINDS["settings"](section))[2:]
    assert [row for row in rows if row.endswith("|  |")] == []


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", PAGES[name]):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_contributing_names_tests_that_exist():
    names = re.findall(r"`((?:invariance|unit)/\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 5 and [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()] == []


def test_every_page_of_the_library_is_in_its_index():
    names = [Path(name).name for name in PAGES if "algorithms/" in name]
    assert [name for name in names if name != "README.md" and f"({name})" not in PAGES["docs/algorithms/README.md"]] == []


@pytest.mark.parametrize("name", PAGES)
def test_no_page_names_a_machine(name):
    assert re.findall(r"/(?:work|tmp|home|root|Users)/\S*", PAGES[name]) == []


@pytest.mark.parametrize("page, kind, base, _language, text", SHOWN, ids=[f"{Path(b[0]).stem}-{i}" for i, b in enumerate(SHOWN)])
def test_yaml_loads(page, kind, base, _language, text, tmp_path, monkeypatch):
    assert kind in ("settings", "parsed") and base in CHANGES, f"{page}: before a YAML block stands <!-- settings: BASE -->, see CHANGES"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.py").write_text(ANSWERS)
    for other, what, file, _, code in BLOCKS:
        if (other, what) == (page, "file"):
            (tmp_path / file).write_text(code)
    yaml = YAML(typ="safe")
    recipe = copy.deepcopy(TINY) | CHANGES[base]
    del recipe["algo"]
    fragment = yaml.load(text)
    for section, values in fragment.items():
        own = recipe.get(section)
        recipe[section] = own | values if isinstance(own, dict) and section in ("train", "sampling") else values
    with (tmp_path / "recipe.yaml").open("w") as file:
        yaml.dump({section: values for section, values in recipe.items() if values is not None}, file)
    settings = load_recipe("recipe.yaml")
    if kind == "settings":                    # parsed: it names files of other runs
        check(settings)


def test_the_reward_of_steps_is_read():
    code = next(text for page, kind, _, _, text in BLOCKS if kind == "file" and "policy-gradients" in page)
    exec(code, names := {})
    answer = read(names["lines"](SimpleNamespace(text="1+1=2\nso\n="), None))
    assert (answer.score, answer.steps) == (1.0, ((6, 1.0), (9, 0.0)))
    assert read(names["lines"](SimpleNamespace(text="no"), None)).score == 0.0
