"""Task sources: what they return, that it is the same in every process, and that bad input is named with its place."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from burnish.data import sources
from burnish.data.generate import create, pack, unpack
from burnish.data.tasks import split

ROOT = Path(__file__).parents[2]
needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# --- puzzles over digits

@pytest.mark.parametrize(("source", "answer", "of_900"), [
    (sources.copy_digits, "312", "900"), (sources.reverse_digits, "213", "009"), (sources.sort_digits, "123", "009"),
])
def test_puzzles_are_solved_and_complete(source, answer, of_900):
    tasks = source(length=3)
    by_prompt = {t.prompt: t.answer for t in tasks}
    assert (by_prompt["312>"], by_prompt["900>"]) == (answer, of_900)
    assert len(by_prompt) == len(tasks) == 1000 and len({t.id for t in tasks}) == 1000
    parts = split(tasks, held_out=200, seed=0)
    assert len(parts.train) == 800 and parts.num_duplicates == 0


def test_puzzles_follow_the_alphabet_and_the_template():
    tasks = sources.sort_digits(length=2, alphabet="ba", prompt="sort {text} {x}:")
    assert [(t.prompt, t.answer) for t in tasks] == [
        ("sort bb {x}:", "bb"), ("sort ba {x}:", "ba"), ("sort ab {x}:", "ba"), ("sort aa {x}:", "aa"),
    ]


def test_a_part_of_the_puzzles_is_drawn_from_the_seed_without_repetition():
    tasks = sources.copy_digits(length=12, size=50, seed=1)
    assert len({t.prompt for t in tasks}) == 50
    assert tasks == sources.copy_digits(length=12, size=50, seed=1) != sources.copy_digits(length=12, size=50, seed=2)


@pytest.mark.parametrize(("values", "message"), [
    ({"length": 0}, "length is 0"),
    ({"alphabet": "aab"}, "different characters"),
    ({"alphabet": ""}, "different characters"),
    ({"length": 2, "size": 101}, "there are 100 texts"),
    ({"length": 2, "size": 0}, "size is 0"),
    ({"length": 9}, "give size"),
    ({"prompt": "text>"}, r"must contain \{text\}"),
])
def test_puzzles_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        sources.copy_digits(**values)


# --- JSONL files

def test_jsonl_with_a_field_a_template_and_messages(write):
    path = write('\ufeff{"q": "1+1?", "a": "2", "level": 1}\n\n{"q": "{x}?", "a": 4.5, "level": null}\n')
    plain = sources.jsonl(path, prompt="q", answer="a", info=["level"])
    assert [(t.prompt, t.answer, t.info) for t in plain] == [("1+1?", "2", {"level": 1}), ("{x}?", 4.5, {"level": None})]
    filled = sources.jsonl(path, prompt='{"json": "{q}"} {level} {q}', limit=1)
    assert [(t.prompt, t.answer, t.info) for t in filled] == [('{"json": "1+1?"} 1 1+1?', None, {})]
    chat = sources.jsonl(path, prompt="q", chat=True, system="be brief", limit=1)[0].prompt
    assert chat == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"})
    path = write(json.dumps({"m": [{"role": "user", "content": "hi", "name": "x"}]}))
    assert sources.jsonl(path, prompt="m", chat=True)[0].prompt == ({"role": "user", "content": "hi"},)


def test_ids_come_from_the_content_not_from_the_place(write):
    first = sources.jsonl(write('{"q": "a"}\n{"q": "b"}', "one.jsonl"), prompt="q")
    second = sources.jsonl(write('{"q": "b"}\n{"q": "a"}', "two.jsonl"), prompt="q")
    assert [t.id for t in first] == [t.id for t in second][::-1] and first[0].id != first[1].id


@pytest.mark.parametrize(("text", "values", "message"), [
    ('{"q": "a"}\n{"q": "b"', {}, r"tasks\.jsonl:2: not JSON"),
    ('{"q": "a"}\n\n["q"]', {}, r"tasks\.jsonl:3: expected one JSON object a line, found a list"),
    (b'{"q": "a"}\n{"q": "\xff"}', {}, r"tasks\.jsonl:2: not UTF-8"),
    ('{"question": "a"}', {"prompt": "questoin"}, r"tasks\.jsonl:1: no field 'questoin'.* did you mean 'question'"),
    ('{"q": "a"}\n{"q": "b", "gold": 1}', {"answer": "gold"}, r"tasks\.jsonl:1: no field 'gold'; it has \['q'\]"),
    ('{"q": "a"}', {"info": ["x"]}, r"tasks\.jsonl:1: no field 'x'"),
    ('{"q": 3}', {}, r"tasks\.jsonl:1: field 'q' is a number"),
    ('{"q": ""}', {}, r"tasks\.jsonl:1: field 'q' is empty"),
    ('{"q": []}', {}, r"tasks\.jsonl:1: field 'q' is a list"),
    ('{"q": [{"role": "user"}]}', {}, r"tasks\.jsonl:1: each message in 'q' needs role and content"),
    ('{"q": {"a": 1}}', {"prompt": "Q: {q}"}, r"tasks\.jsonl:1: field 'q' is an object"),
    ('{"q": "a"}', {"prompt": "Q: {"}, "names no field"),
    ('{"q": "a"}', {"system": "x"}, "needs chat: true"),
    ("\n\n", {}, "holds no tasks"),
])
def test_bad_lines_are_named(write, text, values, message):
    with pytest.raises(ValueError, match=message):
        sources.jsonl(write(text), **{"prompt": "q", **values})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: .*none\.jsonl"):
        sources.jsonl(tmp_path / "none.jsonl", prompt="q")


# --- reasoning-gym

def test_what_json_lacks_survives_packing():
    value = {"a": (1, [2, (3,)]), "b": {1: "x", (2, 3): None}, "c": {"tuple of": 1}, "d": Fraction(-3, 4), "e": [True, 1.5, "t"]}
    plain = json.loads(json.dumps(pack(value)))
    assert unpack(plain) == value and repr(unpack(plain)) == repr(value)
    assert pack([np.float64(0.5), np.int64(3), np.str_("s"), np.array([1, 2])]) == [0.5, 3, "s", [1, 2]]
    with pytest.raises(TypeError, match="holds a set"):
        pack({1})


@needs_gym
def test_reasoning_gym_tasks():
    tasks = sources.reasoning_gym(
        [{"name": "chain_sum", "weight": 3, "max_terms": 2, "max_digits": 1}, "gcd"], size=40, seed=1, prompt="{}Q: {question}\nA:",
    )
    names = [t.info["dataset"] for t in tasks]
    assert (names.count("chain_sum"), names.count("gcd")) == (30, 10) and set(names[:4]) == {"chain_sum", "gcd"}
    sums = [t for t in tasks if t.info["dataset"] == "chain_sum"]
    for task in sums:
        question = task.info["entry"]["question"]
        assert task.prompt == f"{{}}Q: {question}\nA:"
        assert int(task.answer) == eval(question.partition(":")[2].strip(" ="))
        assert task.info["config"] == {"max_terms": 2, "max_digits": 1}
        json.dumps(dict(task.info))


@needs_gym
def test_reasoning_gym_in_chat_form_by_mapping():
    tasks = sources.reasoning_gym({"gcd": {"weight": 2}, "lcm": None}, size=3, chat=True, system="think")
    assert [t.info["dataset"] for t in tasks].count("gcd") == 2
    assert tasks[0].prompt == ({"role": "system", "content": "think"}, {"role": "user", "content": tasks[0].info["entry"]["question"]})


@needs_gym
def test_reasoning_gym_gives_the_same_tasks_under_any_hash_seed():
    """word_ladder and ransom_note walk over sets: under another hash seed the library gives other entries."""
    names = ["word_ladder", "ransom_note", "rush_hour"]
    code = f"from burnish.data.sources import reasoning_gym\nprint(reasoning_gym({names}, size=6, seed=5))"
    other = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": "2"}, text=True)
    tasks = sources.reasoning_gym(names, size=6, seed=5)
    assert other == f"{tasks}\n"
    assert [t.answer for t in tasks if t.info["dataset"] == "rush_hour"] == [None, None]


@needs_gym
@pytest.mark.parametrize(("name", "config", "message"), [
    ("chain_sums", {}, "no dataset 'chain_sums'; did you mean 'chain_sum'"),
    ("chain_sum", {"max_term": 2}, "chain_sum takes no .*did you mean 'max_terms'"),
    ("chain_sum", {"min_terms": 5, "max_terms": 2}, "refuses the settings of chain_sum: max_terms"),
])
def test_settings_that_the_library_does_not_take_are_named(name, config, message):
    with pytest.raises(ValueError, match=message):
        create(name, size=1, seed=0, **config)


@needs_gym
def test_the_childs_message_arrives():
    with pytest.raises(ValueError, match="no dataset 'chain_sums'; did you mean 'chain_sum'"):
        sources.reasoning_gym(["chain_sums"], size=1)


@pytest.mark.parametrize(("datasets", "values", "message"), [
    ([], {}, "datasets is empty"),
    ([{"max_terms": 2}], {}, "needs a name"),
    ([{"name": "gcd", "weight": 0}], {}, "weight is 0"),
    ([{"name": "gcd", "seed": 1}], {}, "stand beside"),
    (["gcd", "lcm"], {"size": 1}, "size is 1 for 2 datasets"),
    (["gcd"], {"prompt": "Q:"}, r"must contain \{question\}"),
])
def test_arguments_that_do_not_fit_are_named(datasets, values, message):
    with pytest.raises(ValueError, match=message):
        sources.reasoning_gym(datasets, **{"size": 4, **values})
