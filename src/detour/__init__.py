"""Detour: an LLM inference server. Import what you need from its module: `from detour.llm import LLM`."""

__version__ = "0.1.0"
