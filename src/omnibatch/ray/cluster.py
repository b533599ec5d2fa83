"""The connection to Ray, made anew when Ray itself was restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayTaskError, WorkerCrashedError

# A Ray that has not run a task without needs by then, twice, is taken to be gone.
ANSWER_SECONDS = 30.0
RETRY_SECONDS = 1.0
# A Ray that is not back by then is given up.
RECONNECT_SECONDS = 300.0


class Cluster:
    """Connects to Ray if the process is not connected yet: to a running cluster, or to a new one on this machine.

    Args:
        on_reconnect: called after a reconnection, when no object and no actor of before is left.

    Attributes:
        generation: how often the connection was made anew.
        closing: whether nobody waits for a connection any more.
    """

    def __init__(self, on_reconnect: Callable[[], None]):
        self.generation = 0
        self.closing = False
        self._on_reconnect = on_reconnect
        self._started_here = not ray.is_initialized()
        if self._started_here:
            ray.init()
        self._address = ray.get_runtime_context().gcs_address

    async def answers(self) -> bool:
        """Whether Ray runs a task that does nothing; a task or a worker that fails was run, too.

        A Ray that was shut down in this process is not asked: whoever uses it next is told.
        """
        for _ in range(2):
            if not ray.is_initialized():
                return True
            # A lambda takes its code along, so that the worker need not have this package.
            task = asyncio.ensure_future(call(ray.remote(num_cpus=0, max_retries=0)(lambda: None)))
            done, _ = await asyncio.wait({task}, timeout=ANSWER_SECONDS)
            task.cancel()
            if done and isinstance(task.exception(), (RayTaskError, WorkerCrashedError, type(None))):
                return True
            await asyncio.sleep(RETRY_SECONDS)
        return False

    def reconnect(self, generation: int) -> None:
        """Connect anew, unless that was done since ``generation``.

        It blocks the caller's event loop, since any use of Ray in between would connect to who knows what.

        Raises:
            ConnectionError: when Ray does not come back.
        """
        if generation != self.generation:
            return
        ray.shutdown()
        deadline = time.monotonic() + RECONNECT_SECONDS
        while not ray.is_initialized():
            if self.closing or time.monotonic() > deadline:
                raise ConnectionError(f"Ray at {self._address} did not come back")
            # Another thread of the process may have connected already.
            with suppress(ConnectionError, RuntimeError):
                self._connect()
            time.sleep(RETRY_SECONDS)
        self.generation += 1
        self._on_reconnect()

    def _connect(self) -> None:
        try:
            ray.init(address=self._address)
        except ConnectionError:
            if not self._started_here:
                raise
            ray.init()
            self._address = ray.get_runtime_context().gcs_address


async def call(remote: Any, *arguments: Any) -> Any:
    """What a remote function or method returns.

    Raises:
        ConnectionError: when Ray was shut down in this process; it would start by itself otherwise.
    """
    if not ray.is_initialized():
        raise ConnectionError("Ray was shut down in this process")
    return await remote.remote(*arguments)
