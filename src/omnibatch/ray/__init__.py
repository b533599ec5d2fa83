"""Rollouts on many devices and machines: one engine in each of many Ray actors.

Needs Ray: ``pip install 'omnibatch[ray]'``.
"""

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("omnibatch.ray needs Ray: pip install 'omnibatch[ray]'") from error

from omnibatch.ray.pool import RolloutPool

__all__ = ["RolloutPool"]
