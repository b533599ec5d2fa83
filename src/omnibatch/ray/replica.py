"""What runs inside each Ray actor: one engine on the actor's device."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

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

    The model is made in :meth:`prepare` and not at once, so that the pool can tell an actor that Ray could not place
    yet from one that dies of its model.

    Args:
        make_adapter: makes what runs the model.
        config: of the engine.
    """

    def __init__(self, make_adapter: Callable[[], Any], config: RolloutConfig):
        self._life = uuid.uuid4().hex
        self._make_adapter = make_adapter
        self._config = config
        self._engine: RolloutEngine | None = None
        self._preparing = asyncio.Lock()
        # The pool's version of the weights, and what the engine calls it, which counts refused updates as well.
        self._version = self._engine_version = 0
        self._in_flight = self._ended = 0
        self._requests = Counter("omnibatch_requests", "Requests that ended", tag_keys=("outcome",))
        self._requests_in_flight = Gauge("omnibatch_requests_in_flight", "Requests in flight")

    async def prepare(self, updates: Sequence[WeightsUpdate]) -> str:
        """Make the model if there is none yet, and write the updates that are newer than its weights, in order.

        Returns:
            What tells this life of the actor from others.

        Raises:
            Exception: whatever making the model raises.
            ValueError: as :func:`~omnibatch.ray.weights.write_weights` does.
        """
        # Several requests may find the weights stale at once.
        async with self._preparing:
            if self._engine is None:
                self._engine = await asyncio.to_thread(self._make_engine)
                self._rollouts = AsyncRolloutEngine(self._engine)
            newer = [update for update in updates if update.version > self._version]
            for update in newer:
                sent = await update.weights[0]
                try:
                    async with self._rollouts.update_weights():
                        transformer = self._engine.adapter.transformer
                        write_weights(transformer, sent, update.lora_config, update.adapter_name)
                        self._version = max(self._version, update.version)
                finally:
                    self._engine_version = self._engine.weights_version
        return self._life

    async def generate(self, request: OmniDiffusionRequest, version: int) -> dict[str, Any]:
        """Run a request with weights of a version.

        Returns:
            Its output, packed; what was wrong with the request is its ``error``.

        Raises:
            StaleWeights: when the replica's weights are of another version, or it has no model yet.
        """
        if self._engine is None:
            raise StaleWeights("no weights are loaded yet")
        self._require_version(version, self._engine_version)
        self._count(+1)
        try:
            output = await self._rollouts.generate(request)
            self._require_version(version, output.weights_version)
            output.weights_version = version
        except (StaleWeights, asyncio.CancelledError):
            raise
        except BaseException as error:
            if isinstance(error, BROKEN_DEVICE) or not isinstance(error, Exception) or not self._rollouts.is_running:
                # Nothing works in this process any more; Ray starts a new one.
                os._exit(1)
            output = DiffusionOutput(request.request_id, error=error, weights_version=version)
        finally:
            self._count(-1)
            self._ended += 1
        self._requests.inc(tags={"outcome": "finished" if output.error is None else "failed"})
        return pack_output(output)

    async def heartbeat(self) -> tuple[str, int]:
        """This life of the actor; and steps taken and requests ended so far, which show that the engine goes on."""
        return self._life, self._ended + (0 if self._engine is None else self._engine.steps_done)

    def _make_engine(self) -> RolloutEngine:
        return RolloutEngine(self._make_adapter(), self._config)

    def _require_version(self, version: int, engine_version: int) -> None:
        if (version, engine_version) != (self._version, self._engine_version):
            raise StaleWeights(f"weights of version {self._version} are loaded, {version} was asked for")

    def _count(self, change: int) -> None:
        self._in_flight += change
        self._requests_in_flight.set(self._in_flight)
