"""Stage records. Each stage takes the record of the stage before it and returns a new one; nothing is filled in later.

Task -> Rollout -> Scored -> Group -> Batch. All are frozen plain data and import no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    logp_gen: tuple[float, ...]    # [T] nats under the sampler as it sampled; 0.0 where not sampled
    turns: tuple[Turn, ...]
    stop: str
    version: int                   # oldest weights that wrote any of it

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.sampled) != n or len(self.logp_gen) != n:
            raise ValueError(
                f"rollout of task {self.task.id}: {n} tokens, {len(self.sampled)} sampled flags, "
                f"{len(self.logp_gen)} log-probs; the three must be equally long"
            )

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


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task in one step."""

    task: Task
    scored: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout ready for the trainer."""

    tokens: tuple[int, ...]        # [T]
    sampled: tuple[bool, ...]      # [T]
    logp_gen: tuple[float, ...]    # [T]
    logp_ref: tuple[float, ...] | None  # [T] nats under the reference; None where the algorithm has none
    adv: float                     # advantage, the same for each sampled token
    reward: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step and their counts."""

    rows: tuple[Row, ...]
    num_tokens: int                # sampled tokens of all rows
    num_rollouts: int              # rows with at least one sampled token
