"""Checkpoints: atomic, checksummed, safetensors and one small state file."""

from burnish.checkpoint.folder import Checkpoint, CheckpointError, DamagedError, newest, prune, read, write

__all__ = ["Checkpoint", "CheckpointError", "DamagedError", "newest", "prune", "read", "write"]
