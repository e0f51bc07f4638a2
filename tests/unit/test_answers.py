"""Written answers: where examples come from, which side of the split they fall on, and the tokens that are learned (T6, T22)."""

from __future__ import annotations

import gzip
import json
import math

import pytest
from tiny import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.api import Trainer
from burnish.api.distillation import is_on_policy
from burnish.chat.template import encode_answer, encode_prompt
from burnish.config.errors import SettingsError
from burnish.data.answers import jsonl, of_tasks, split_answers
from burnish.data.tasks import answer_id
from burnish.plan.preflight import examine
from burnish.types import Example, Pair, Rated

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EXAMPLES = (Example,)
ASKED = {"role": "user", "content": "x"}


def example(prompt, answer="yes"):
    return Example(answer_id(prompt, answer), prompt, answer)


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# sources

def test_fields_and_templates_make_examples(tmp_path):
    file = write(tmp_path / "a.jsonl", {"question": "1+1?", "work": "two", "n": 2}, "", {"question": "2+2?", "work": "four", "n": 4})
    plain = jsonl(file, prompt="question", answer="work")
    assert [(e.prompt, e.answer) for e in plain] == [("1+1?", "two"), ("2+2?", "four")]
    filled = jsonl(file, prompt="Q: {question}\nA: ", answer="{work}\n#### {n}", limit=1)
    assert [(e.prompt, e.answer) for e in filled] == [("Q: 1+1?\nA: ", "two\n#### 2")]
    chat = jsonl(file, prompt="question", answer="work", chat=True, system="Count.", limit=1)
    assert chat[0].prompt == ({"role": "system", "content": "Count."}, {"role": "user", "content": "1+1?"})
    assert chat[0].id == jsonl(file, prompt="question", answer="work", chat=True, system="Count.")[0].id
    assert len({e.id for e in [*plain, *filled, *chat]}) == 4


def test_a_packed_file_reads_the_same(tmp_path):
    file = write(tmp_path / "a.jsonl", {"p": "x", "a": "y"})
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
        packed.write(file.read_bytes())
    assert jsonl(tmp_path / "a.jsonl.gz", prompt="p", answer="a") == jsonl(file, prompt="p", answer="a")


def test_the_last_turn_of_a_conversation_is_learned_and_the_others_are_read(tmp_path):
    said = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "ciao")]
    turns = [{"role": role, "content": text} for role, text in said]
    (made,) = jsonl(write(tmp_path / "a.jsonl", {"messages": turns}), messages="messages")
    assert made.answer == "ciao"
    assert [m["content"] for m in made.prompt] == ["hi", "hello", "bye"]


@pytest.mark.parametrize(
    ("row", "values", "said"),
    [
        ({"q": "x"}, {"prompt": "q", "answer": "a"}, r"a\.jsonl:2: no field 'a'; it has \['q'\]"),
        ({"q": "x", "a": ""}, {"prompt": "q", "answer": "a"}, r"a\.jsonl:2: field 'a' is empty"),
        ({"q": "x", "a": 3}, {"prompt": "q", "answer": "a"}, r"a\.jsonl:2: field 'a' is a number; an answer is a text.*\{a\}"),
        ({"q": "x", "a": [1]}, {"prompt": "q", "answer": "{a}"}, r"a\.jsonl:2: field 'a' is a list"),
        ({"q": "", "a": "y"}, {"prompt": "q", "answer": "a"}, r"a\.jsonl:2: field 'q' is empty"),
        ("{", {"prompt": "q", "answer": "a"}, r"a\.jsonl:2: not JSON"),
        ({"m": "hello"}, {"messages": "m"}, r"a\.jsonl:2: field 'm' is a text; a conversation is a list"),
        ({"m": []}, {"messages": "m"}, r"a\.jsonl:2: field 'm' is a list"),
        ({"m": [{"role": "assistant", "content": "x"}]}, {"messages": "m"}, r"a\.jsonl:2: .* roles \['assistant'\]"),
        (
            {"m": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}, {"messages": "m"},
            r"a\.jsonl:2: .*\['assistant', 'user'\]; the last is learned",
        ),
        ({"m": [ASKED, {"role": "assistant", "content": ""}]}, {"messages": "m"}, r"a\.jsonl:2: the last .* is empty"),
        ({"m": [ASKED, {"role": "assistant", "content": None}]}, {"messages": "m"}, r"a\.jsonl:2: .*as texts"),
    ],
)
def test_a_line_that_cannot_be_learned_is_named(tmp_path, row, values, said):
    file = write(tmp_path / "a.jsonl", "", row)
    with pytest.raises(ValueError, match=said):
        jsonl(file, **values)


@pytest.mark.parametrize(
    "values", [{}, {"prompt": "q"}, {"answer": "a"}, {"messages": "m", "prompt": "q"}, {"messages": "m", "answer": "a"}]
)
def test_which_fields_hold_what_has_to_be_said(tmp_path, values):
    with pytest.raises(ValueError, match=r"name the fields of a prompt and its answer .* or that of a conversation"):
        jsonl(write(tmp_path / "a.jsonl", {"q": "x", "a": "y"}), **values)


def test_a_conversation_has_its_own_system_message(tmp_path):
    with pytest.raises(ValueError, match="messages of a conversation are taken as they are"):
        jsonl(write(tmp_path / "a.jsonl", {}), messages="m", system="Be kind.")


def test_an_empty_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no examples"):
        jsonl(write(tmp_path / "a.jsonl", ""), prompt="q", answer="a")
    with pytest.raises(ValueError, match="no such file"):
        jsonl(tmp_path / "b.jsonl", prompt="q", answer="a")


def test_tasks_with_text_answers_are_examples(tmp_path):
    made = of_tasks({"ref": "reverse_digits", "length": 2})
    assert len(made) == 100
    assert {(e.prompt, e.answer) for e in made} >= {("12>", "21"), ("70>", "07")}
    mine = tmp_path / "mine.py"
    mine.write_text("from burnish.types import Task\n\ndef numbers():\n    return [Task('a', 'x', 3)]\n\ndef words():\n    return ['x']\n")
    with pytest.raises(ValueError, match="task a has the answer 3, and what is to be learned is a text"):
        of_tasks(f"{mine}:numbers")
    with pytest.raises(ValueError, match=r"gives a str; of_tasks takes a source of burnish\.types\.Task"):
        of_tasks(f"{mine}:words")


# the split

def test_no_prompt_stands_on_both_sides_with_any_of_its_answers():
    items = [example(f"q{i % 20}", f"a{i}") for i in range(60)]
    found = split_answers(items, kinds=EXAMPLES, held_out=5, seed=0)
    sides = [{e.prompt for e in side} for side in (found.train, found.held_out)]
    assert [len(side) for side in sides] == [15, 5]
    assert not sides[0] & sides[1]
    assert [len(found.train), len(found.held_out)] == [45, 15]
    assert list(found.train) == [e for e in items if e.prompt in sides[0]]


def test_the_split_depends_on_seed_and_prompts_only():
    items = [example(f"q{i}") for i in range(30)]
    held = [{e.id for e in split_answers(some, kinds=EXAMPLES, held_out=6, seed=seed).held_out} for some, seed in (
        (items, 0), (items[::-1], 0), (items, 1))]
    assert held[0] == held[1] != held[2]


def test_entries_that_stand_twice_are_left_out_and_counted():
    found = split_answers([example("q"), example("q"), example("q", "no"), example("r")], kinds=EXAMPLES, held_out=1, seed=0)
    assert found.num_duplicates == 1
    assert len(found.train) + len(found.held_out) == 3


@pytest.mark.parametrize(
    ("items", "error", "said"),
    [
        ([], ValueError, "returned nothing"),
        ([example("q")], ValueError, "held_out is 1, but the source has 1 distinct prompts"),
        ([example("q"), "text"], TypeError, "item 1 is a str"),
        ([example("q"), Pair("p", "q", "a", "b")], TypeError, "item 1 is a Pair"),
        ([Example("a", "q", "x"), Example("a", "r", "y")], ValueError, "two different entries have the id 'a'"),
        ([Example("a", "q", 3)], TypeError, r"item 0 \(id a\): answer is a int"),
        ([Pair("a", "q", "x", "x")], ValueError, "chosen and rejected are the same text"),
        ([Pair("a", "q", "x", "y", margin=math.nan)], ValueError, "not finite"),
        ([Rated("a", "q", "x", ratings=(1.0, math.inf))], ValueError, "not finite"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(items, error, said):
    kinds = (type(items[0]),) if items else EXAMPLES
    with pytest.raises(error, match=said):
        split_answers(items, kinds=kinds, held_out=1 if items and isinstance(items[0], Example) else 0, seed=0)


# tokens

@pytest.fixture
def chat_tokenizer():
    words = ["<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "system", "hello", "world", "bye"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHATML
    return fast


def test_the_answer_and_one_end_token_are_learned(tiny_llama):
    tokenizer = tiny_llama.tokenizer
    tokens, mask = encode_answer(tokenizer, "1+2=", "3", end=tokenizer.eos_token_id)
    assert tokens == [*encode_prompt(tokenizer, "1+2="), tokenizer.encode("3", add_special_tokens=False)[0], tokenizer.eos_token_id]
    assert mask == [False] * 4 + [True] * 2


def test_a_conversation_is_the_templates_own_rendering(chat_tokenizer):
    turns = tuple({"role": r, "content": c} for r, c in [("user", "hello"), ("assistant", "world"), ("user", "bye")])
    tokens, mask = encode_answer(chat_tokenizer, turns, "hello world", end=chat_tokenizer.eos_token_id)
    whole = chat_tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "hello world"}], return_dict=False)
    assert tokens == whole[: len(tokens)]
    assert chat_tokenizer.decode(whole[len(tokens) :]) == "\n"              # only what stands behind the end token is missing
    assert [t for t, m in zip(tokens, mask, strict=True) if m] == chat_tokenizer.convert_tokens_to_ids(["hello", "world", "<|im_end|>"])


# preflight

ANSWERS = {"source": {"ref": "of_tasks", "tasks": {"ref": "copy_digits", "length": 2}}, "held_out": 10}
SFT = {"loop": "sft", "algo": None, "sft": {}, "data": ANSWERS, "sampling": {}, "train": {"steps": 2, "examples_per_step": 4}}


def told(changes):
    with pytest.raises(SettingsError) as refused:
        examine(tiny(SFT | changes))
    return str(refused.value)


def source(tmp_path, *rows):
    return {"source": {"ref": "jsonl", "path": str(write(tmp_path / "a.jsonl", *rows)), "prompt": "q", "answer": "a"}}


def test_an_answer_of_other_characters_is_found_before_training(tmp_path):
    said = told({"data": source(tmp_path, *[{"q": f"{i}>", "a": "two" if i == 5 else "2"} for i in range(8)])})
    assert "data: an answer cannot be encoded: the model's tokenizer has no token for ['o', 't', 'w']" in said


def test_answers_that_are_all_too_long_are_refused(tmp_path):
    data = source(tmp_path, *[{"q": f"{i}>", "a": "2222"} for i in range(8)])
    assert "data: with their prompts all answers are longer than data.max_tokens, 6 tokens" in told({"data": data | {"max_tokens": 6}})
    examine(tiny(SFT | {"data": data | {"max_tokens": 7}}))
    assert "data.max_tokens is 99999, but scratch llama has a context of" in told({"data": data | {"max_tokens": 99999}})


def test_an_end_token_of_another_model_is_refused():
    assert "evaluate.sampling.end_tokens: '<|im_end|>' is not one token" in told({"evaluate.sampling.end_tokens": ["<|im_end|>"]})


def test_too_few_answers_for_one_step_are_refused(tmp_path):
    said = told({"data": source(tmp_path, {"q": "1>", "a": "1"}, {"q": "2>", "a": "2"})})
    assert "leaves 2 to train on, but one step takes train.examples_per_step=4" in said


def test_answers_that_are_too_long_are_left_out_and_counted(tmp_path):
    data = source(tmp_path, *[{"q": f"{i}>", "a": "2222" if i % 2 else "2"} for i in range(8)]) | {"max_tokens": 5}
    done = Trainer(tiny(SFT | {"data": data, "train": {"steps": 1, "examples_per_step": 8}}), out=tmp_path / "run").run()
    (row,) = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert (row["train/too_long_count"], row["train/rollouts_count"], row["train/tokens_count"]) == (4, 4, 8)


DISTILL = SFT | {"loop": "distill", "sft": None}


def test_a_teacher_that_is_not_there_is_named_with_the_run_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = told(DISTILL | {"distill": {"teachers": [{"model": {"path": "runs/sft-tiny/model"}}]}})
    assert "distill.teachers.0.model.path runs/sft-tiny/model: there is no 'runs'" in said
    assert "make it first: burnish train sft-tiny" in said


def test_a_teacher_with_other_tokens_is_refused():
    said = told(DISTILL | {"distill": {"teachers": [{"model": {"scratch": {"alphabet": "012345678>9"}}}]}})
    assert "distill.teachers.0.model: its tokens are not those of the policy: '9' has the number 12 there and 11 here" in said


def test_a_divergence_that_cannot_be_called_is_refused(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def cold(logits_cur, logits_teach):\n    return (logits_cur - logits_teach).abs().sum(-1)\n")
    teachers = [{"model": tiny().model.model_dump()}]
    said = told(DISTILL | {"distill": {"teachers": teachers, "divergence": f"{mine}:cold"}})
    assert "distill.divergence" in said and "temperature" in said


# which steps are the policy's own

def test_a_share_of_the_steps_is_the_policys_own_and_stays_so():
    steps = [is_on_policy(step, 0.3, seed=0) for step in range(1, 4001)]
    assert steps == [is_on_policy(step, 0.3, seed=0) for step in range(1, 4001)]
    assert sum(steps) / 4000 == pytest.approx(0.3, abs=0.03)
    assert steps != [is_on_policy(step, 0.3, seed=1) for step in range(1, 4001)]
    assert not any(is_on_policy(step, 0.0, seed=0) for step in range(2000))
    assert all(is_on_policy(step, 1.0, seed=0) for step in range(2000))


def test_answers_to_held_out_tasks_are_not_trained_on():
    """The two sources are split alike, so this matters where more tasks are held out than answers, or the files differ."""
    checked = examine(tiny(SFT | {"tasks.held_out": 30}))
    asked = {task.prompt for task in checked.tasks[""].held_out}
    assert not asked & {e.prompt for e in checked.answers.train}
    assert (len(asked), len(checked.answers.train), checked.answers.num_asked) == (30, 70, 20)
    assert "20 entries of data have the prompt of a held-out task and are not trained on" in checked.notes
    assert examine(tiny(SFT)).answers.num_asked == 0
