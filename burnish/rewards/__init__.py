"""Rewards that burnish ships, by short name: exact, positions, each_position, last_number, reasoning_gym, learned.

A reward is any function of (rollout, task), or of (rollouts), all of one call at once, which returns one value for each; or a class whose
objects are called so, made once with the values of the recipe. A value is a number, None for what cannot be scored, or the rewards of steps
as a list of [end_chars, value].
"""

from burnish.rewards.text import each_position, exact, last_number, positions

__all__ = ["each_position", "exact", "last_number", "learned", "positions", "reasoning_gym"]


def __getattr__(name: str):
    # Not at the top: they import libraries that take a second, or may be absent
    if name == "reasoning_gym":
        from burnish.rewards.reasoning import reasoning_gym

        return reasoning_gym
    if name == "learned":
        from burnish.rewards.model_scores import learned

        return learned
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
