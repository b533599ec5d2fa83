"""Adapters, one file a model family, and the registry that finds them."""

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.adapters.registry import load, register_adapter

__all__ = ["RolloutAdapter", "load", "register_adapter"]
