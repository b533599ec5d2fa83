"""What runs inside each Ray actor: one engine on the actor's device."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.util.metrics import Counter, Gauge

from omnibatch.async_engine import AsyncRolloutEngine
from omnibatch.config import RolloutConfig
from omnibatch.engine import RolloutEngine
from omnibatch.ray.transfer import pack_output
from omnibatch.ray.weights import WeightsUpdate, write_weights
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest

# After one of these the device's context is broken for good; torch has the class since 2.8.
BROKEN_DEVICE: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()


class StaleWeights(RuntimeError):
    """The replica's weights are not of the version that the request is to run with."""


class Replica:
    """An engine that a :class:`~omnibatch.ray.RolloutPool` talks to.

    Args:
        make_adapter: makes what runs the model.
        config: of the engine.
    """

    def __init__(self, make_adapter: Callable[[], Any], config: RolloutConfig):
        self._adapter = make_adapter()
        self._engine = RolloutEngine(self._adapter, config)
        self._rollouts = AsyncRolloutEngine(self._engine)
        # The pool's version of the weights, and what the engine calls it, which counts refused updates as well.
        self._version = self._engine_version = 0
        self._in_flight = 0
        self._requests = Counter("omnibatch_requests", "Requests that ended", tag_keys=("outcome",))
        self._requests_in_flight = Gauge("omnibatch_requests_in_flight", "Requests in flight")

    async def generate(self, request: OmniDiffusionRequest, version: int) -> dict[str, Any]:
        """Run a request with weights of a version.

        Returns:
            Its output, packed; what was wrong with the request is its ``error``.

        Raises:
            StaleWeights: when the replica's weights are of another version.
        """
        self._require_version(version, self._engine_version)
        self._count(+1)
        try:
            output = await self._rollouts.generate(request)
            self._require_version(version, output.weights_version)
            output.weights_version = version
        except StaleWeights:
            raise
        except BROKEN_DEVICE:
            self._leave()
            raise
        except Exception as error:
            if not self._rollouts.is_running:
                self._leave()
            output = DiffusionOutput(request.request_id, error=_sendable(error), weights_version=version)
        finally:
            self._count(-1)
        self._requests.inc(tags={"outcome": "finished" if output.error is None else "failed"})
        return pack_output(output)

    async def apply(self, updates: Sequence[WeightsUpdate]) -> None:
        """Write the updates that are newer than the replica's weights, in order.

        Raises:
            ValueError: as :func:`~omnibatch.ray.weights.write_weights` does.
        """
        for update in updates:
            if update.version <= self._version:
                continue
            sent = await update.weights[0]
            try:
                async with self._rollouts.update_weights():
                    write_weights(self._adapter.transformer, sent, update.lora_config, update.adapter_name)
                    self._version = update.version
            finally:
                self._engine_version = self._engine.weights_version

    async def heartbeat(self) -> int:
        """Denoising steps taken so far, which shows that the engine goes on."""
        return self._engine.steps_done

    def _require_version(self, version: int, engine_version: int) -> None:
        if (version, engine_version) != (self._version, self._engine_version):
            raise StaleWeights(f"weights of version {self._version} are loaded, {version} was asked for")

    def _count(self, change: int) -> None:
        self._in_flight += change
        self._requests_in_flight.set(self._in_flight)

    def _leave(self) -> None:
        """End the process, which cannot serve any more; Ray starts a new one."""
        os._exit(1)


def _sendable(error: Exception) -> Exception:
    """The error, or its words where another process could not make it again."""
    try:
        if isinstance(pickle.loads(ray.cloudpickle.dumps(error)), type(error)):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
