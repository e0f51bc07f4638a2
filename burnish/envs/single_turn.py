"""One prompt, one answer."""

from __future__ import annotations

from burnish.envs.base import Reply
from burnish.types import Prompt, Task


class single_turn:  # noqa: N801 - named in recipes like a function
    """The task's prompt, then the policy's only turn."""

    def start(self, task: Task) -> Prompt:
        return task.prompt

    async def step(self, text: str) -> Reply:
        return Reply(done=True)
