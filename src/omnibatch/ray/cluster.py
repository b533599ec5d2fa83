"""The connection to Ray, made anew when Ray itself was restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import ray

# A task that needs no resources; a Ray that has not run it by then is taken to be gone.
ANSWER_SECONDS = 30.0
RETRY_SECONDS = 1.0


class Cluster:
    """Connects to Ray if the process is not connected yet: to a running cluster, or to a new one on this machine.

    Args:
        on_reconnect: called after a reconnection, when no object and no actor of before is left.

    Attributes:
        generation: how often the connection was made anew.
    """

    def __init__(self, on_reconnect: Callable[[], None]):
        self.generation = 0
        self._on_reconnect = on_reconnect
        self._started_here = not ray.is_initialized()
        if self._started_here:
            ray.init()
        self._address = ray.get_runtime_context().gcs_address

    async def answers(self) -> bool:
        """Whether Ray runs a task that does nothing."""
        try:
            await asyncio.wait_for(_run_nothing(), ANSWER_SECONDS)
        except Exception:
            return False
        return True

    def reconnect(self, generation: int) -> None:
        """Connect anew, unless that was done since ``generation``.

        It blocks the caller's event loop, since any use of Ray in between would connect to who knows what.
        """
        if generation != self.generation:
            return
        ray.shutdown()
        while not ray.is_initialized():
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


async def _run_nothing() -> None:
    await ray.remote(num_cpus=0, max_retries=0)(_nothing).remote()


def _nothing() -> None:
    pass
