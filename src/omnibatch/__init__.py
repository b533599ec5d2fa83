"""omnibatch: exact, mixed batching of diffusion rollouts, inside the process that trains the model."""

from omnibatch.adapters import RolloutAdapter, load, register_adapter
from omnibatch.async_engine import AsyncRolloutEngine
from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.engine import RolloutEngine
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams, RolloutError
from omnibatch.request_batch import DiffusionRequestBatch

__version__ = "0.1.0"

__all__ = [
    "AsyncRolloutEngine",
    "DiffusionOutput",
    "DiffusionRequestBatch",
    "ExecutionMode",
    "OmniDiffusionRequest",
    "OmniDiffusionSamplingParams",
    "RolloutAdapter",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "load",
    "register_adapter",
]
