"""Guesses at the next tokens from the sequence itself, and whether checking them pays.

Prompt lookup: what followed the last tokens when they stood there before (Saxena 2023, "Prompt Lookup Decoding"). A guess is put through
the model beside the newest token, and each of its tokens stands exactly if the sequence's own draw gives it: with one certain guess that is
the acceptance rule of speculative sampling (arXiv:2211.17192, section 2.3), and the sequence is the one that is drawn without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
MOST = 8


class Lookup:
    """Finds where the last NGRAM tokens stood before; takes new tokens as they come."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}        # n-gram -> place behind its newest occurrence
        self.num_known = 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow; none where the end of `tokens` is new."""
        for end in range(max(self.num_known, NGRAM), len(tokens)):
            self.after[tuple(tokens[end - NGRAM : end])] = end
        self.num_known = max(len(tokens), NGRAM)
        at = self.after.get(tuple(tokens[-NGRAM:]))
        if at is None or most < 1:
            return ()
        guess = list(tokens[at : at + most])
        while len(guess) < most:                           # it repeats itself up to the end: go on repeating
            guess.append(guess[len(guess) - (len(tokens) - at)])
        return tuple(guess)


class Payoff:
    """How long a guess is worth its rows: tokens won a second, from measured steps and measured acceptance."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}                # of a step, by its rows rounded up to a power of two
        self.rate = 0.7                                    # of guessed tokens that stand, running mean

    def saw_step(self, num_rows: int, seconds: float) -> None:
        """Steps of prompts are not shown here."""
        size = _size(num_rows)
        known = self.seconds.get(size)
        # a step that was disturbed takes longer, never shorter
        self.seconds[size] = seconds if known is None or seconds < known else known + 0.02 * (seconds - known)

    def saw_guess(self, num_guessed: int, num_stood: int) -> None:
        tried = min(num_stood + 1, num_guessed)            # behind the first that falls nothing was tried
        for i in range(tried):
            self.rate += 0.05 * ((i < num_stood) - self.rate)

    def length(self, num_writing: int) -> int:
        """Tokens to guess for each of so many sequences; 0: it does not pay."""
        best, best_speed = 0, 1 / self._seconds(num_writing)
        for length in (1, 2, 4, MOST):
            tokens = sum(self.rate**i for i in range(length + 1))
            speed = tokens / self._seconds(num_writing * (1 + length))
            if speed > 1.05 * best_speed:
                best, best_speed = length, speed
        if best == 0:
            self.rate += 0.002 * (0.7 - self.rate)         # tried again after a while
        return best

    def _seconds(self, num_rows: int) -> float:
        """A size that was not seen counts as the nearest smaller one that was: so it is tried."""
        size = _size(num_rows)
        seen = [s for s in self.seconds if s <= size]
        return max(self.seconds[max(seen)], 1e-9) if seen else 1.0


def _size(num_rows: int) -> int:
    return 1 << max(num_rows - 1, 0).bit_length()
