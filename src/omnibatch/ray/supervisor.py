"""One replica through its lives: Ray starts its actor again when it dies, this notices, and waits until it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from omnibatch.ray.cluster import RETRY_SECONDS, Cluster
from omnibatch.ray.weights import WeightsUpdate

# An actor that was up and then cannot be made this many times in a row is given up.
MOST_FAILED_STARTS = 3
HEARTBEAT_SECONDS = 5.0


class ClusterLost(Exception):
    """Ray itself does not answer."""


class SupervisedReplica:
    """An actor and what is known of its health.

    Args:
        name: of the replica, over all its lives.
        make_actor: makes a :class:`~omnibatch.ray.replica.Replica` actor, which Ray restarts when it dies.
        cluster: the connection to Ray.
        timeout_seconds: without a sign of life for this long, or without a step while it has requests, the actor
            hangs.
    """

    def __init__(self, name: str, make_actor: Callable[[], Any], cluster: Cluster, timeout_seconds: float):
        self.name = name
        self.actor: Any = None
        self._make_actor = make_actor
        self._cluster = cluster
        self._generation = 0
        self._timeout = timeout_seconds
        self._was_up = False
        self._trouble = asyncio.Event()

    def report(self) -> None:
        """Say that a call of the actor failed."""
        self._trouble.set()

    async def bring_up(self, updates: Callable[[], Sequence[WeightsUpdate]]) -> None:
        """Wait until the actor answers and has the newest weights.

        Raises:
            Exception: why the actor cannot be made.
        """
        failed_starts = 0
        while True:
            if self.actor is None:
                self._generation, self.actor = self._cluster.generation, self._make_actor()
            try:
                await self._while_ray_answers(_result(self.actor.apply, updates()))
                break
            except ActorUnavailableError:
                # Ray is restarting it, or waits for a place where it can.
                await asyncio.sleep(RETRY_SECONDS)
                if not await self._cluster.answers():
                    self._reconnect()
            except ClusterLost:
                self._reconnect()
            except Exception:
                # It could not be made, or a restarted Ray does not know it.
                failed_starts += 1
                if not self._was_up or failed_starts == MOST_FAILED_STARTS:
                    raise
                self.actor = None
                await asyncio.sleep(RETRY_SECONDS)
        self._was_up = True
        self._trouble.clear()

    async def until_lost(self, is_busy: Callable[[], bool]) -> None:
        """Return when the actor has died, or hung and was killed."""
        loop = asyncio.get_running_loop()
        steps, since = -1, loop.time()
        while not self._trouble.is_set():
            heartbeat = asyncio.ensure_future(_result(self.actor.heartbeat))
            trouble = asyncio.ensure_future(self._trouble.wait())
            done, pending = await asyncio.wait(
                {heartbeat, trouble}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
            )
            for task in pending:
                task.cancel()
            if trouble in done or (heartbeat in done and heartbeat.exception() is not None):
                return
            if heartbeat not in done:
                self.kill(restart=True)
                return
            if heartbeat.result() != steps or not is_busy():
                steps, since = heartbeat.result(), loop.time()
            elif loop.time() - since > self._timeout:
                self.kill(restart=True)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._trouble.wait(), min(HEARTBEAT_SECONDS, self._timeout / 2))

    def kill(self, *, restart: bool) -> None:
        """End the actor's process; Ray starts it again if it is to."""
        if self.actor is not None:
            # Whatever is wrong with it, it is not worse afterwards.
            with suppress(Exception):
                ray.kill(self.actor, no_restart=not restart)

    def _reconnect(self) -> None:
        self._cluster.reconnect(self._generation)
        self.actor = None

    async def _while_ray_answers(self, call: Any) -> Any:
        """The call's result, for which Ray is waited for as long as it answers at all."""
        task = asyncio.ensure_future(call)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._timeout)
                if done:
                    return task.result()
                if not await self._cluster.answers():
                    raise ClusterLost
        finally:
            task.cancel()


async def _result(method: Any, *arguments: Any) -> Any:
    return await method.remote(*arguments)
