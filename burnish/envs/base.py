"""What an environment is: text in, text out, one object an episode. Tokens are the rollout's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from burnish.types import Prompt, Task


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's answer to one turn of the policy. An empty text with done ends the episode."""

    text: str = ""
    done: bool = False


class Env(Protocol):
    """Made anew for each episode, with the recipe's values as arguments."""

    def start(self, task: Task) -> Prompt:
        """What the policy reads first."""
        ...

    async def step(self, text: str) -> Reply:
        """The policy wrote `text`; what comes back. All episodes share one event loop: await what takes time, never block."""
        ...
