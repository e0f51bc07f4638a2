"""The vLLM engine, in this process or as a server. Importing this imports no vllm."""

from burnish.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
