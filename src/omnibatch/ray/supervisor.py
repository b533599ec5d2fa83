"""One replica through its lives: Ray starts its actor again when it dies, this notices, and waits until it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from omnibatch.ray.cluster import RETRY_SECONDS, Cluster, call
from omnibatch.ray.weights import WeightsUpdate

# An actor whose model cannot be made this many times in a row is given up.
MOST_FAILED_STARTS = 3
HEARTBEAT_SECONDS = 5.0
# Restarting an actor takes seconds; only after this many tries Ray itself is asked whether it is there.
TRIES_UNTIL_DOUBT = 10


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
        self._life = ""
        self._trouble = asyncio.Event()

    def report(self) -> None:
        """Say that a call of the actor failed."""
        self._trouble.set()

    async def bring_up(self, updates: Sequence[WeightsUpdate]) -> None:
        """Wait until Ray has placed the actor, however long that takes, then let it make its model.

        Raises:
            Exception: why the model cannot be made: at the first start at once, later after several tries.
        """
        failed_starts = tries = 0
        while True:
            if self.actor is None:
                self._generation, self.actor = self._cluster.generation, self._make_actor()
            is_placed = False
            try:
                await self._while_ray_answers(call(self.actor.heartbeat))
                is_placed = True
                self._life = await self._while_ray_answers(call(self.actor.prepare, updates))
                break
            except ClusterLost:
                self._reconnect()
            except ConnectionError:
                raise
            except Exception as error:
                await asyncio.sleep(RETRY_SECONDS)
                if isinstance(error, ActorUnavailableError) and not is_placed:
                    # Ray is restarting it, or waits for a place where it can.
                    tries += 1
                    if tries % TRIES_UNTIL_DOUBT == 0 and not await self._cluster.answers():
                        self._reconnect()
                    continue
                failed_starts += 1
                refused = isinstance(error, RayTaskError)
                if failed_starts == MOST_FAILED_STARTS or (refused and not self._was_up):
                    if isinstance(error, RayActorError):
                        raise RuntimeError("its process died each time while the model was made") from error
                    raise
                if not isinstance(error, ActorUnavailableError):
                    # Ray does not know it, or its model may be in no state to go on with.
                    self.kill(restart=False)
                    self.actor = None
        self._was_up = True
        self._trouble.clear()

    async def until_lost(self, is_busy: Callable[[], bool]) -> None:
        """Return when the actor has died, or hung and was killed."""
        steps, since = -1, time.monotonic()
        while not self._trouble.is_set():
            life, done_so_far = await self._heartbeat()
            if life != self._life:
                # It died, and may be back already, with nothing of what it had.
                return
            if done_so_far != steps or not is_busy():
                steps, since = done_so_far, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                self.kill(restart=True)
                return
            await self._wait_for_trouble(min(HEARTBEAT_SECONDS, self._timeout / 2))

    def kill(self, *, restart: bool) -> None:
        """End the actor's process; Ray starts it again if it is to."""
        if self.actor is not None and ray.is_initialized():
            # Whatever is wrong with it, it is not worse afterwards.
            with suppress(Exception):
                ray.kill(self.actor, no_restart=not restart)

    def _reconnect(self) -> None:
        self._cluster.reconnect(self._generation)
        self.actor = None

    async def _heartbeat(self) -> tuple[str, int]:
        """The actor's life, and what it has done; no life when it died, or gave no sign of one and was killed."""
        heartbeat = asyncio.ensure_future(_or_none(call(self.actor.heartbeat)))
        try:
            await self._wait_for_trouble(self._timeout, heartbeat)
            if heartbeat.done():
                return heartbeat.result() or ("", 0)
            if not self._trouble.is_set():
                self.kill(restart=True)
            return "", 0
        finally:
            heartbeat.cancel()

    async def _wait_for_trouble(self, seconds: float, *others: asyncio.Future[Any]) -> None:
        """Return when there is trouble, when another is done, or when the time is over."""
        trouble = asyncio.ensure_future(self._trouble.wait())
        try:
            await asyncio.wait({trouble, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            trouble.cancel()

    async def _while_ray_answers(self, calling: Any) -> Any:
        """The call's result, for which Ray is waited for as long as it answers at all."""
        task = asyncio.ensure_future(calling)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._timeout)
                if done:
                    return task.result()
                if not await self._cluster.answers():
                    raise ClusterLost
        finally:
            task.cancel()


async def _or_none(calling: Any) -> Any:
    try:
        return await calling
    except Exception:
        return None
