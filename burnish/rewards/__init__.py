"""Rewards that burnish ships, by short name: exact, positions, last_number, reasoning_gym. A reward is any function of (rollout, task)."""

from burnish.rewards.text import exact, last_number, positions

__all__ = ["exact", "last_number", "positions", "reasoning_gym"]


def __getattr__(name: str):
    # Not at the top: it imports a library that takes a second and may be absent
    if name == "reasoning_gym":
        from burnish.rewards.reasoning import reasoning_gym

        return reasoning_gym
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
