"""Where the steps of an answer end, from characters to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from burnish.types import Rollout, Turn

Decode = Callable[[Sequence[int]], str]
"""Tokens of the policy to their text, special ones included."""


def last_tokens(rollout: Rollout, ends_chars: Sequence[int], decode: Decode) -> list[int]:
    """The place in the rollout of each step's last token.

    ends_chars: characters from the start of what the policy wrote, its turns one after the other, up to each step's end. A step that
    ends where a turn's text does takes the end token and stop string with it. Raises ValueError for an end behind the text.
    """
    out = []
    turns = [turn for turn in rollout.turns if turn.author == "policy"]
    for end in ends_chars:
        left = end
        for turn in turns:
            if left <= len(turn.text):
                out.append(turn.end - 1 if left == len(turn.text) else _token_at(rollout, turn, left, decode))
                break
            left -= len(turn.text)
        else:
            raise ValueError(f"a step ends at character {end}, but the policy wrote {sum(len(turn.text) for turn in turns)}")
    return out


def _token_at(rollout: Rollout, turn: Turn, chars: int, decode: Decode) -> int:
    """The first token of the turn up to which its first `chars` characters are complete."""
    def text_to(at: int) -> str:
        return decode(rollout.tokens[turn.start : at + 1])

    low, high = turn.start, turn.end - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(text_to(middle)) >= chars else (middle + 1, high)
    while low < turn.end - 1 and text_to(low)[:chars] != turn.text[:chars]:       # part of a character decodes to another one
        low += 1
    return low
