"""Sources of pairs and ratings: the field's shapes of files, and answers of tasks against those of others."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from burnish.data import answers
from burnish.data.answer_pairs import jsonl_pairs, jsonl_ratings, pairs_of_tasks, ratings_of_tasks, transcripts
from burnish.data.answers import split_answers
from burnish.ref import Ref
from burnish.types import Pair, Rated

HH = Path("/work/shared/data/hh_rlhf/test.jsonl.gz")
needs_hh = pytest.mark.skipif(not HH.is_file(), reason="the hh-rlhf file is not here")
ASKED = {"role": "user", "content": "Capital of France?"}
TASKS = {"ref": "copy_digits", "length": 2}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="data.jsonl"):
        path = tmp_path / name
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def same_but_id(pair, *, prompt, chosen, rejected, margin=None):
    return (pair.prompt, pair.chosen, pair.rejected, pair.margin) == (prompt, chosen, rejected, margin)


# pairs

@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_prompts_and_answers_as_texts(write, name):
    path = write({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, name=name)
    one, two = jsonl_pairs(path)
    assert same_but_id(one, prompt="2+2=", chosen="4", rejected="5")
    assert same_but_id(two, prompt="1+1=", chosen="2", rejected="3")
    assert one.id != two.id
    assert jsonl_pairs(path, limit=1) == [one]


def test_messages_templates_margins_and_other_names(write):
    path = write({"prompt": [ASKED], "chosen": [said("Paris.")], "rejected": [said("Lyon.")]})
    assert same_but_id(*jsonl_pairs(path), prompt=(ASKED,), chosen="Paris.", rejected="Lyon.")
    path = write({"q": "2+2", "good": "4", "bad": "5", "by": 3})
    (pair,) = jsonl_pairs(path, prompt="Q: {q}\nA:", chosen="good", rejected="bad", margin="by", chat=True, system="Be brief.")
    prompt = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: 2+2\nA:"})
    assert same_but_id(pair, prompt=prompt, chosen="4", rejected="5", margin=3.0)


def test_whole_conversations_share_their_prompt(write):
    path = write({"chosen": [ASKED, said("Paris.")], "rejected": [ASKED, said("Lyon.")]})
    assert same_but_id(*jsonl_pairs(path, prompt=None), prompt=(ASKED,), chosen="Paris.", rejected="Lyon.")


GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize("row, values, message", [
    ({"prompt": "p", "chosen": "a"}, {}, "no field 'rejected'; it has"),
    ({**GOOD, "chosen": None}, {}, "field 'chosen' is null; an answer is a text or a list with the assistant's message"),
    ({**GOOD, "chosen": ""}, {}, "the chosen answer is empty"),
    ({**GOOD, "rejected": "  "}, {}, "the rejected answer is empty"),
    ({**GOOD, "prompt": ""}, {}, "field 'prompt' is empty"),
    ({**GOOD, "rejected": "a"}, {}, "the chosen and the rejected answer are the same text"),
    ({**GOOD, "chosen": [ASKED, said("x")]}, {}, "has messages of ['user', 'assistant']; an answer is one message"),
    ({**GOOD, "chosen": [{"role": "assistant"}]}, {}, "each message in 'chosen' needs role and content as texts"),
    ({**GOOD, "by": "much"}, {"margin": "by"}, "field 'by' is 'much'; it is a finite number"),
    ('{"prompt": "p", "chosen": "a", "rejected": "b", "by": NaN}', {"margin": "by"}, "field 'by' is nan; it is a finite number"),
    (GOOD, {"prompt": None}, "with prompt: null both are lists of messages"),
    ({"chosen": [ASKED, said("a")], "rejected": [{**ASKED, "content": "?"}, said("b")]}, {"prompt": None}, "differ before their last"),
    ({"chosen": [ASKED], "rejected": [ASKED]}, {"prompt": None}, "ends with the assistant's message, after a prompt; this one has"),
    ("[1]", {}, "expected one JSON object a line, found a list"),
    ("{'prompt': 'p'}", {}, "not JSON"),
])
def test_a_bad_line_is_named(write, row, values, message):
    path = write(GOOD if values.get("prompt", "") is not None else {"chosen": [ASKED, said("a")], "rejected": [ASKED, said("b")]}, row)
    if "margin" in values:
        path = write({**GOOD, "by": 1}, row)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:2: .*{re.escape(message)}"):
        jsonl_pairs(path, **values)


def test_files_that_hold_nothing(write, tmp_path):
    with pytest.raises(ValueError, match="holds no entries that can be used"):
        jsonl_pairs(write(""))
    with pytest.raises(ValueError, match="no such file"):
        jsonl_pairs(tmp_path / "gone.jsonl")
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:-12])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        jsonl_pairs(torn)


# transcripts

def dialogue(*turns):
    return "".join(f"\n\n{who}: {text}" for who, text in turns)


HI = ("Human", "Hi")


def test_transcripts_share_all_but_the_last_reply(write):
    one = {"chosen": dialogue(HI, ("Assistant", "Hello")), "rejected": dialogue(HI, ("Assistant", "Go away"))}
    twice = {"chosen": dialogue(HI, ("Human", "B"), ("Assistant", "ok")), "rejected": dialogue(HI, ("Human", "B"), ("Assistant", "hm"))}
    path = write(one, twice)
    first, second = transcripts(path)
    assert same_but_id(first, prompt="\n\nHuman: Hi\n\nAssistant:", chosen=" Hello", rejected=" Go away")
    assert first.prompt + first.chosen == one["chosen"]
    assert second.prompt == "\n\nHuman: Hi\n\nHuman: B\n\nAssistant:"
    first, second = transcripts(path, chat=True)
    assert same_but_id(first, prompt=({"role": "user", "content": "Hi"},), chosen="Hello", rejected="Go away")
    assert [m["role"] for m in second.prompt] == ["user", "user"]


def test_transcripts_that_are_no_pair_are_refused_or_left_out_and_told(write):
    good = {"chosen": dialogue(HI, ("Assistant", "Hello")), "rejected": dialogue(HI, ("Assistant", "Go away"))}
    empty = {"chosen": dialogue(HI, ("Assistant", "")), "rejected": dialogue(HI, ("Assistant", "What?"))}
    forked = {"chosen": dialogue(HI, ("Assistant", "x"), HI, ("Assistant", "y")), "rejected": dialogue(HI, ("Assistant", "z"))}
    path = write(good, empty, forked)
    with pytest.raises(ValueError, match=r":2: the chosen answer is empty"):
        transcripts(path)
    with pytest.raises(ValueError, match=r":2: the two conversations differ"):
        transcripts(write(good, forked))
    with pytest.warns(UserWarning, match="2 of 3 lines are left out"):
        assert len(transcripts(write(good, empty, forked), unusable="leave_out")) == 1
    with pytest.raises(ValueError, match=r":1: field 'chosen' begins with 'Hi'; a transcript begins"):
        transcripts(write({"chosen": "Hi", "rejected": "Ho"}), unusable="leave_out")


@needs_hh
def test_the_real_file_of_transcripts():
    with pytest.raises(ValueError, match=r"test\.jsonl\.gz:87: .*; with unusable: leave_out"):
        transcripts(HH)
    with pytest.warns(UserWarning, match="9 of 2312 lines are left out"):
        pairs = transcripts(HH, unusable="leave_out")
    assert len(pairs) == 2303
    assert all(p.prompt.endswith("\n\nAssistant:") and p.chosen.startswith(" ") for p in pairs)
    with gzip.open(HH, "rt") as file:
        assert json.loads(next(file))["rejected"] == pairs[0].prompt + pairs[0].rejected
    chats = transcripts(HH, chat=True, limit=80)
    assert {m["role"] for p in chats for m in p.prompt} == {"user", "assistant"}
    assert all(text == text.strip() for p in chats for text in (p.chosen, p.rejected, *(m["content"] for m in p.prompt)))
    held = split_answers(pairs, kinds=(Pair,), held_out=100, seed=0)
    assert {p.prompt for p in held.train}.isdisjoint({p.prompt for p in held.held_out})


# ratings

def test_wanted_and_unwanted_answers(write):
    path = write(
        {"prompt": "a", "completion": "x", "label": True}, {"prompt": "b", "completion": "y", "label": "False"},
        {"prompt": "c", "completion": "z", "label": 1}, {"prompt": [ASKED], "completion": [said("w")], "label": 0},
    )
    rated = jsonl_ratings(path)
    assert [r.wanted for r in rated] == [True, False, True, False]
    assert (rated[3].prompt, rated[3].answer, rated[3].ratings) == ((ASKED,), "w", ())
    assert len({r.id for r in rated}) == 4


def test_numbers_as_ratings(write):
    row = {"prompt": "a", "completion": "x", "helpful": 3, "true": None}
    path = write(row, {**row, "true": 1})
    rated = jsonl_ratings(path, label=None, ratings=("helpful", "true"))
    assert [(r.wanted, r.ratings) for r in rated] == [(None, (3.0, None)), (None, (3.0, 1.0))]
    with pytest.raises(ValueError, match="name the field that judges"):
        jsonl_ratings(path, label=None)


@pytest.mark.parametrize("label", ["good", None, 2, 0.5, [], ""])
def test_a_label_that_is_neither_is_named(write, label):
    path = write({"prompt": "a", "completion": "x", "label": True}, {"prompt": "d", "completion": "w", "label": label})
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: label is {re.escape(repr(label))}; it is one of true, false, 1, 0"):
        jsonl_ratings(path)


# of tasks

def test_pairs_of_tasks_have_the_own_answer_first():
    pairs = pairs_of_tasks(TASKS)
    assert len(pairs) == 100
    assert all(p.prompt == f"{p.chosen}>" and p.rejected != p.chosen for p in pairs)
    assert pairs == pairs_of_tasks(TASKS)
    assert pairs != pairs_of_tasks(TASKS, seed=1)
    swapped = pairs_of_tasks(TASKS, swapped_frac=0.2)
    assert 8 <= sum(p.prompt != f"{p.chosen}>" for p in swapped) <= 32


def test_ratings_of_tasks_tell_whose_answer_it_is():
    rated = ratings_of_tasks(TASKS, wanted_frac=0.3)
    assert all(r.wanted == (r.prompt == f"{r.answer}>") == bool(r.ratings[0]) for r in rated)
    assert 15 <= sum(r.wanted for r in rated) <= 45


@pytest.mark.parametrize("call, message", [
    (lambda: pairs_of_tasks(TASKS, swapped_frac=0.5), "swapped_frac is 0.5"),
    (lambda: ratings_of_tasks(TASKS, wanted_frac=1.0), "wanted_frac is 1.0"),
    (lambda: pairs_of_tasks({"ref": "copy_digits", "length": 1, "alphabet": "7"}), "all answers of copy_digits are the same"),
    (lambda: pairs_of_tasks({"ref": "burnish.data.answers:of_tasks", "tasks": TASKS}), "made of tasks whose answers are texts"),
])
def test_what_makes_no_pairs_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("name, kind", [("pairs_of_tasks", Pair), ("ratings_of_tasks", Rated)])
def test_short_names_lead_here(name, kind):
    made = Ref(name, {"tasks": TASKS}).bind(room="burnish.data.answers")()
    assert {type(item) for item in made} == {kind}
    assert all(hasattr(answers, other) for other in ("jsonl_pairs", "jsonl_ratings", "transcripts"))
