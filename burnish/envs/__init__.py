"""Environments: what the policy talks to."""

from burnish.envs.base import Env, Reply
from burnish.envs.single_turn import single_turn

__all__ = ["Env", "Reply", "single_turn"]
