"""Prompts to tokens and end tokens to ids."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from burnish.chat.template import encode_prompt, encode_reply, end_token_ids

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer():
    """Adds a begin and an end token to what it encodes, as some models' tokenizers do."""
    words = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "system", "hello", "world", "None"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed"),
    ])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHATML
    return fast


def test_text_gets_the_begin_token_and_no_end_token(tokenizer):
    assert tokenizer.encode("hello world") == [0, 8, 9, 1]
    assert encode_prompt(tokenizer, "hello world") == [0, 8, 9]


def test_text_that_holds_the_begin_token_has_it_once(tokenizer):
    assert encode_prompt(tokenizer, "<s>hello") == [0, 8]


def test_text_without_a_begin_token(tiny_llama):
    tokens = encode_prompt(tiny_llama.tokenizer, "1+2=")
    assert tiny_llama.tokenizer.decode(tokens) == "1+2="
    assert len(tokens) == 4


def test_messages_end_where_the_assistant_begins(tokenizer):
    messages = ({"role": "user", "content": "hello world"},)
    got = encode_prompt(tokenizer, messages)
    assert got == [2, 5, 4, 8, 9, 3, 4, 2, 6, 4]
    assert got == tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)


def test_template_with_a_begin_token_of_its_own_has_it_once(tokenizer):
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    assert encode_prompt(tokenizer, ({"role": "user", "content": "hello"},)).count(0) == 1


def test_reply_has_neither_begin_nor_end_token(tokenizer):
    assert encode_reply(tokenizer, "world\n") == [9, 4]


@pytest.mark.parametrize(("prompt", "message"), [
    ((), "empty list"),
    (({"role": "user", "content": None},), "content that are texts"),
    (({"content": "hello"},), "role"),
])
def test_bad_messages(tokenizer, prompt, message):
    with pytest.raises(ValueError, match=message):
        encode_prompt(tokenizer, prompt)


def test_a_role_the_template_refuses(tokenizer):
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}hello"
    with pytest.raises(ValueError, match="no system here"):
        encode_prompt(tokenizer, ({"role": "system", "content": "hello"},))


def test_messages_without_a_template(tiny_llama):
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tiny_llama.tokenizer, ({"role": "user", "content": "1"},))


def test_empty_text(tiny_llama):
    with pytest.raises(ValueError, match="empty prompt"):
        encode_prompt(tiny_llama.tokenizer, "")


def test_a_character_outside_the_alphabet_is_named(tiny_llama):
    with pytest.raises(ValueError, match=r"no token for .*%"):
        encode_prompt(tiny_llama.tokenizer, "5%3=")


def test_end_tokens(tokenizer, tiny_llama):
    assert end_token_ids(tokenizer, None) == (1,)
    assert end_token_ids(tokenizer, ("<|im_end|>", "</s>", "<|im_end|>")) == (3, 1)
    assert end_token_ids(tokenizer, ()) == ()
    newline = end_token_ids(tiny_llama.tokenizer, ("\n",))
    assert tiny_llama.tokenizer.decode(newline) == "\n"


def test_an_end_token_that_is_none_names_the_nearest(tokenizer):
    with pytest.raises(ValueError, match=r"<\|imend\|>.*<\|im_end\|>"):
        end_token_ids(tokenizer, ("<|imend|>",))


def test_an_end_token_of_several_tokens(tiny_llama):
    with pytest.raises(ValueError, match="not one token"):
        end_token_ids(tiny_llama.tokenizer, ("ab",))


def test_a_tokenizer_without_an_end_token(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"sampling\.end_tokens"):
        end_token_ids(tokenizer, None)
