"""The native engine: the training module itself with its own cache."""

from burnish.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
