"""Rollouts: task x environment x engine x reward -> groups; what is kept; the batch."""

from burnish.rollout.batch import KlReward, assemble
from burnish.rollout.gather import Gathered, gather
from burnish.rollout.keep import Kept, keep, keep_best
from burnish.rollout.run import Visit, run_group, run_groups
from burnish.rollout.summary import summarize

__all__ = ["Gathered", "Kept", "KlReward", "Visit", "assemble", "gather", "keep", "keep_best", "run_group", "run_groups", "summarize"]
