"""The engines that a recipe can name."""

from __future__ import annotations

from burnish.engines.native import NativeEngine as native

__all__ = ["native"]
