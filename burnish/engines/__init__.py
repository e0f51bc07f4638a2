"""Engines: what samples from the policy."""

from burnish.engines.base import Abilities, Completion, Engine, Request

__all__ = ["Abilities", "Completion", "Engine", "Request"]
