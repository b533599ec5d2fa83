"""Adapters, one file a model family, the registry that finds them, and the check that an adapter must pass."""

from typing import Any

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.adapters.registry import load, register_adapter

__all__ = ["RolloutAdapter", "check", "load", "register_adapter"]


def __getattr__(name: str) -> Any:
    # Not imported above: the check runs the engine, which imports this package.
    if name == "check":
        from omnibatch.conformance import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
