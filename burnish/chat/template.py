"""Text and messages to tokens, and names of end tokens to ids."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

from burnish.config import Sampling
from burnish.types import Message, Prompt

WORD_START = "\u2581"


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokens of a prompt, at least one.

    Plain text is encoded as it stands, after a begin token where the tokenizer adds one, and never an end token after it.
    Messages go through the tokenizer's chat template up to where the assistant begins to write.
    Raises ValueError for a missing template, a message without text, or a text that the tokenizer cannot write.
    """
    if not isinstance(prompt, str):
        return _encode_messages(tokenizer, prompt)
    tokens = _encode(tokenizer, prompt)
    bos = tokenizer.bos_token_id
    if bos is not None and tokens[:1] != [bos] and tokenizer.encode(prompt)[:1] == [bos]:
        tokens = [bos, *tokens]
    if not tokens:
        raise ValueError("an empty prompt gives the model nothing to continue; give it a text")
    return tokens


def encode_answer(
    tokenizer: Any, prompt: Prompt, answer: str, *, end: int, specials: bool = True
) -> tuple[list[int], list[bool]]:
    """Tokens of a prompt with its answer, and which of them are the answer's: its text as it stands, and the end token behind it.

    The same tokens that sampling would give, had the policy written this answer. specials: as in encode_reply.
    """
    start = encode_prompt(tokenizer, prompt)
    written = [*encode_reply(tokenizer, answer, specials=specials), end]
    return start + written, [False] * len(start) + [True] * len(written)


def encode_steps(
    tokenizer: Any, prompt: Prompt, answer: str, ends_chars: Sequence[int], *, specials: bool = True
) -> tuple[list[int], list[int]]:
    """Tokens of a prompt with an answer made of steps, each encoded on its own, and the place of each step's last token.

    ends_chars: characters of the answer up to each step's end; what follows the last one is left out. specials: as in encode_reply.
    """
    tokens, places = encode_prompt(tokenizer, prompt), []
    for start, end in itertools.pairwise((0, *ends_chars)):
        step = encode_reply(tokenizer, answer[start:end], specials=specials)
        if not step:
            raise ValueError(f"the step {answer[start:end]!r} has no token of the model's tokenizer")
        tokens += step
        places.append(len(tokens) - 1)
    return tokens, places


def encode_reply(tokenizer: Any, text: str, *, specials: bool = True) -> list[int]:
    """Tokens of an environment's reply between turns of plain text: as it stands, no begin or end token.

    specials False: what looks like a special token is plain text, for a text whose author must not write one.
    """
    tokens = _encode(tokenizer, text, specials=specials)
    first = tokenizer.convert_ids_to_tokens(tokens[:1])
    if first and first[0].startswith(WORD_START) and not text.startswith((" ", WORD_START)):
        # SentencePiece puts a space before a text; behind a line's end it does not
        head, both = _encode(tokenizer, "\n"), _encode(tokenizer, "\n" + text, specials=specials)
        if both[: len(head)] == head:
            return both[len(head) :]
    return tokens


def end_token_ids(tokenizer: Any, end_tokens: tuple[str | int, ...] | None) -> tuple[int, ...]:
    """Ids of the named end tokens, each one token of the vocabulary; None: the tokenizer's own end token.

    A name is a token of the vocabulary (<|im_end|>) or a text that is exactly one token ("\\n"). Raises ValueError for others.
    """
    if end_tokens is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer names no end token; name the tokens that end a turn in sampling.end_tokens")
        return (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys(_token_id(tokenizer, name, "end_tokens") for name in end_tokens))


def by_ids(sampling: Sampling, tokenizer: Any) -> Sampling:
    """The same with ids in place of every token's name. Raises ValueError for a name that is not one token."""
    return sampling.model_copy(update={
        "end_tokens": end_token_ids(tokenizer, sampling.end_tokens),
        "banned_tokens": tuple(_token_id(tokenizer, name, "banned_tokens") for name in sampling.banned_tokens),
        "logit_bias": {_token_id(tokenizer, name, "logit_bias"): value for name, value in sampling.logit_bias.items()},
    })


def _token_id(tokenizer: Any, name: str | int, setting: str) -> int:
    vocab = tokenizer.get_vocab()
    if isinstance(name, int):
        if not 0 <= name < len(tokenizer):
            raise ValueError(f"sampling.{setting}: {name} is no id of the model's vocabulary, which ends at {len(tokenizer) - 1}")
        return name
    if name in vocab:
        return vocab[name]
    try:
        tokens = tokenizer.encode(name, add_special_tokens=False)
    except Exception:   # a character outside of the vocabulary
        tokens = []
    if len(tokens) == 1 and tokenizer.decode(tokens) == name:
        return tokens[0]
    near = difflib.get_close_matches(name, tokenizer.all_special_tokens, 3, 0.4) or difflib.get_close_matches(name, vocab, 3)
    hint = f"; near it are {near}" if near else ""
    raise ValueError(f"sampling.{setting}: {name!r} is not one token of the model's vocabulary, but {len(tokens)}{hint}")


def _encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError("the prompt is a list of messages, but the model's tokenizer has no chat template; give the prompt as text")
    if not messages:
        raise ValueError("the prompt is an empty list of messages; give at least one")
    for message in messages:
        if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message needs a role and a content that are texts; found {message!r}")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:   # templates raise what they like, such as jinja's TemplateError for a role they do not know
        raise ValueError(f"the model's chat template refuses the roles {[m['role'] for m in messages]}: {error}") from error
    return _encode(tokenizer, text)


def _encode(tokenizer: Any, text: str, *, specials: bool = True) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not specials)
    except Exception as error:   # tokenizers raises a plain Exception for a character outside of its vocabulary
        unknown = [c for c in sorted(set(text)) if not _encodes(tokenizer, c)]
        raise ValueError(f"the model's tokenizer has no token for {unknown or text[:80]!r}: {error}") from error


def _encodes(tokenizer: Any, text: str) -> bool:
    try:
        tokenizer.encode(text, add_special_tokens=False)
    except Exception:
        return False
    return True
