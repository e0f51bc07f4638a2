"""Stage records. Each stage takes the record of the stage before it and returns a new one; nothing is filled in later.

Task -> Rollout -> Scored -> Group -> Batch. All are frozen plain data and import no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict


class Message(TypedDict):
    """One turn of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""Plain text is continued as it stands; messages go through the model's chat template."""

Author = Literal["prompt", "policy", "env"]


@dataclass(frozen=True, slots=True)
class Task:
    """What the policy is asked to do. `answer` and `info` are plain JSON data for rewards and environments."""

    id: str
    prompt: Prompt
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A span tokens[start:end] of a rollout with one author. `text` is for reading only and is never encoded again.

    For the policy's turns `text` leaves out the end token and the stop string; the tokens keep them.
    """

    author: Author
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode, token by token, as it was sampled.

    stop: "end_token" | "stop_string" | "max_tokens" | "context" | "env" | "error:<what>".
    """

    task: Task
    sample: int                    # n-th sample of this task in this step
    tokens: tuple[int, ...]        # [T] prompt, samples and environment replies, in order
    sampled: tuple[bool, ...]      # [T] True where the policy wrote the token
    logp_gen: tuple[float, ...]    # [T] nats under the sampler as it sampled; 0.0 where not sampled; empty where it did not tell
    turns: tuple[Turn, ...]
    stop: str
    version: int                   # oldest weights that wrote any of it

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.sampled) != n or len(self.logp_gen) not in (0, n):
            raise ValueError(
                f"rollout of task {self.task.id}: {n} tokens, {len(self.sampled)} sampled flags, "
                f"{len(self.logp_gen)} log-probs; the three must be equally long"
            )

    @property
    def columns(self) -> dict[str, tuple[float, ...]]:
        """What a row of it brings: logp_gen, where it is known."""
        return {"logp_gen": self.logp_gen} if self.logp_gen else {}

    @property
    def text(self) -> str:
        """What the policy wrote in its last turn, without end token and stop string."""
        return next((t.text for t in reversed(self.turns) if t.author == "policy"), "")

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def truncated(self) -> bool:
        """The policy was cut off before it ended by itself."""
        return self.stop in ("max_tokens", "context")


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout with its reward. None means: could not be scored, for the reason in `errors`; never a number."""

    rollout: Rollout
    reward: float | None
    scores: Mapping[str, float | None]                 # by reward name, before weights
    errors: Mapping[str, str] = field(default_factory=dict)
    cost: float | None = None                          # of the rewards that are costs; None where there are none
    steps: tuple[tuple[int, float], ...] = ()          # rewards of steps: index of a step's last token, value; part of `reward` too
    given: float | None = None                         # the reward before it was normalised; None where it was not


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task in one step."""

    task: Task
    scored: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the answer that is to be learned, for supervised fine-tuning and distillation."""

    id: str
    prompt: Prompt
    answer: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, of which the first was preferred. `margin` says by how much, where that is known."""

    id: str
    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Rated:
    """One answer with a judgement of its own: wanted or not (KTO), a number or several (regression), a class (ordinal), or, where it
    has `steps`, one class a step.
    """

    id: str
    prompt: Prompt
    answer: str
    wanted: bool | None = None
    ratings: tuple[float | None, ...] = ()
    steps: tuple[int, ...] = ()    # characters of the answer up to each step's end


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence ready for the trainer.

    `columns` are numbers a token ([T] each, read only where `mask`), by the names of trainer.columns.COLUMNS; `numbers` are one a
    row. `algo` names the algorithm that trains it where a run has several.
    """

    tokens: tuple[int, ...]        # [T]
    mask: tuple[bool, ...]         # [T] True on the tokens that are trained on
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    algo: str = ""

    def __post_init__(self) -> None:
        for name, values in (("mask", self.mask), *self.columns.items()):
            if len(values) != len(self.tokens):
                raise ValueError(f"a row of {len(self.tokens)} tokens has {len(values)} values of {name}; there is one a token")

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(self.mask)

    def put(self, **columns: float | tuple[float, ...]) -> Row:
        """The row with these columns; a single number stands at every token of the mask."""
        spread = {
            name: tuple(value if m else 0.0 for m in self.mask) if isinstance(value, int | float) else tuple(value)
            for name, value in columns.items()
        }
        return replace(self, columns={**self.columns, **spread})


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step. `rows_per_unit` rows in a row belong together: 1, or 2 where the loss compares two (chosen, rejected)."""

    rows: tuple[Row, ...]
    rows_per_unit: int = 1

    def __post_init__(self) -> None:
        if len(self.rows) % self.rows_per_unit:
            raise ValueError(f"{len(self.rows)} rows do not make units of {self.rows_per_unit}")

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_rollouts(self) -> int:
        """Rows with at least one token to train on."""
        return sum(row.num_tokens > 0 for row in self.rows)
