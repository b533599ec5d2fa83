"""The engine for asynchronous callers: many tasks await their own request, a background thread runs them together."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

from omnibatch.engine import RolloutEngine
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest


class AsyncRolloutEngine:
    """Awaitable requests over a :class:`~omnibatch.RolloutEngine`, which it then owns.

    Requests of all tasks share forwards as the engine's mode allows. Cancelling a task aborts its request.

    Args:
        engine: nobody else may use it any more.

    Example:
        >>> async def main(engine, requests):
        ...     async with AsyncRolloutEngine(engine) as rollouts:
        ...         return await asyncio.gather(*[rollouts.generate(request) for request in requests])
    """

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        # The engine is not thread-safe: whatever others want of it is queued and done by the one thread.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pending: dict[str, Future[DiffusionOutput]] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        self._released: threading.Event | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="omnibatch", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncRolloutEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def is_running(self) -> bool:
        """False after :meth:`close`, and after something ended the thread; then no more requests are taken."""
        return not self._stopping

    async def generate(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        """Run one request to its end.

        Raises:
            Exception: whatever ended the request: its own fault, a :class:`~omnibatch.request.RequestAborted`.
            RuntimeError: when the engine is closed.
        """
        future: Future[DiffusionOutput] = Future()
        self._command(lambda: self._submit(request, future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not self._stopping:
                self._command(lambda: self._abort(request.request_id, future))
            raise

    @asynccontextmanager
    async def update_weights(self, *, abort_running: bool = False) -> AsyncIterator[None]:
        """As :meth:`RolloutEngine.update_weights`; requests awaited meanwhile run afterwards.

        Raises:
            RuntimeError: when the engine is closed, or the weights are being updated already.
        """
        ready: Future[None] = Future()
        left: Future[None] = Future()
        released = threading.Event()
        with self._lock:
            if self._released is not None:
                raise RuntimeError("the weights are being updated already")
            self._released = released

        def update() -> None:
            if not ready.set_running_or_notify_cancel():
                return
            try:
                with self._engine.update_weights(abort_running=abort_running):
                    # Whoever awaits what has just ended may do so within the context.
                    self._deliver(self._engine.step())
                    ready.set_result(None)
                    released.wait()
            finally:
                left.set_result(None)

        try:
            self._command(update)
            await asyncio.wrap_future(ready)
            yield
        finally:
            released.set()
            self._released = None
            if ready.done() and not ready.cancelled():
                # Only then has the engine its new version.
                await asyncio.wrap_future(left)

    def close(self) -> None:
        """End everything in flight with an error and stop the thread."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._commands.put(lambda: None)
            if self._released is not None:
                self._released.set()
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        # Under the lock, no command can slip in behind the thread's last look at the queue.
        with self._lock:
            if self._stopping:
                raise RuntimeError("the engine is closed") from self._failure
            self._commands.put(command)

    def _submit(self, request: OmniDiffusionRequest, future: Future[DiffusionOutput]) -> None:
        if future.cancelled():
            return
        try:
            self._pending[self._engine.submit(request)] = future
        except Exception as error:
            _settle(future, error)

    def _abort(self, request_id: str, future: Future[DiffusionOutput]) -> None:
        if self._pending.get(request_id) is future:
            self._engine.abort(request_id)
            # At once, so that the id is free for another try.
            self._deliver(self._engine.take_ended())

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self._engine.has_unfinished and not self._engine.wait_seconds():
                    self._deliver(self._engine.step())
        except BaseException as error:
            # Nobody may wait for ever for a thread that is gone.
            with self._lock:
                self._stopping = True
            self._failure = error
            for future in self._pending.values():
                _settle(future, error)
            self._pending.clear()
        finally:
            while not self._commands.empty():
                self._commands.get()()
            self._deliver(self._engine.close())

    def _obey(self) -> None:
        """Do what is queued. Sleep until something is when there is nothing to run, or not yet."""
        wait = self._engine.wait_seconds() if self._engine.has_unfinished else None
        try:
            command = self._commands.get(block=wait != 0, timeout=wait or None)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _deliver(self, outputs: list[DiffusionOutput]) -> None:
        for output in outputs:
            future = self._pending.pop(output.request_id, None)
            if future is not None:
                _settle(future, output if output.error is None else output.error)


def _settle(future: Future[DiffusionOutput], result: DiffusionOutput | BaseException) -> None:
    # A future that was cancelled in the meantime takes no result.
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, StopIteration):
        # Not even a future may carry one.
        future.set_exception(RuntimeError(f"StopIteration: {result}"))
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
