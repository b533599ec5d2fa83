"""What happens in a pool's own thread: requests are handed out, outputs awaited, lost ones run again."""

from __future__ import annotations

import asyncio
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from omnibatch.ray.assignment import Assignment
from omnibatch.ray.cluster import Cluster, call
from omnibatch.ray.pending import PendingRequest, group_of, with_seed
from omnibatch.ray.replica import StaleWeights
from omnibatch.ray.supervisor import SupervisedReplica
from omnibatch.ray.transfer import unpack_output
from omnibatch.ray.weights import WeightsUpdate
from omnibatch.request import (
    DiffusionOutput,
    OmniDiffusionRequest,
    RequestAborted,
    requested_outputs,
    requested_steps,
    validate_request_id,
)

# How long the first replica that is ready waits for the others.
GRACE_SECONDS = 60.0


class Coordinator:
    """Everything of a pool that changes; used in one event loop alone.

    Args:
        make_actor: makes a :class:`~omnibatch.ray.replica.Replica` actor.
        capacity: requests that a replica holds at most.
        num_replicas: actors.
        health_check_timeout_s: after which an actor without a sign of life counts as hanging.

    Attributes:
        weights_version: of the weights that requests are run with.
    """

    def __init__(self, make_actor: Callable[[], Any], capacity: int, num_replicas: int, health_check_timeout_s: float):
        self.weights_version = 0
        self._assignment = Assignment(capacity)
        self._pending: dict[str, PendingRequest] = {}
        self._sendings = itertools.count()
        self._updates: list[WeightsUpdate] = []
        self._sent_weights: dict[int, Mapping[str, Any]] = {}
        self._started = self._updating = self._dispatch_is_due = False
        self._idle = asyncio.Event()
        self._failure: Exception | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._cluster = Cluster(on_reconnect=self._send_weights_again)
        self._replicas = {
            name: SupervisedReplica(name, make_actor, self._cluster, health_check_timeout_s)
            for name in (f"replica-{index}" for index in range(num_replicas))
        }

    @property
    def num_replicas(self) -> int:
        """Replicas that take requests now."""
        return len(self._assignment.replicas)

    async def start(self) -> None:
        """Return when all replicas are up, or when the first is and the others take long.

        Raises:
            RuntimeError: when one cannot be made.
        """
        self._keepers = [asyncio.ensure_future(self._keep(replica)) for replica in self._replicas.values()]
        if not await self._are_up(1, GRACE_SECONDS):
            place = f"the cluster has no place for what ray_actor_options ask (it has {ray.cluster_resources()})"
            warnings.warn(f"no replica is up yet: it is large, or {place}. The pool goes on waiting", stacklevel=2)
            await self._are_up(1, float("inf"))
        await self._are_up(len(self._keepers), GRACE_SECONDS)
        if missing := len(self._keepers) - self.num_replicas:
            warnings.warn(
                f"{missing} of {len(self._keepers)} replicas are not up: the cluster may lack the resources for them. "
                "They join when they are",
                stacklevel=2,
            )
        self._started = True

    def close(self) -> None:
        """Give up on a Ray that is being waited for; from any thread, before :meth:`stop`."""
        self._cluster.closing = True

    async def stop(self) -> None:
        """End everything in flight with an error, and the replicas."""
        for keeper in self._keepers:
            keeper.cancel()
        for request_id in list(self._pending):
            self.abort(request_id, reason=f"the pool was closed before request {request_id!r} ended")
        for replica in self._replicas.values():
            replica.kill(restart=False)
        # Updates and aborts of other threads may still wait for something.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def add(self, requests: Sequence[tuple[OmniDiffusionRequest, Future[DiffusionOutput]]]) -> None:
        """Take requests, each with where its output goes; together, so that their groups are known before the first
        is handed out."""
        for request, ended in requests:
            # From here on nobody but the pool ends it.
            if not ended.set_running_or_notify_cancel():
                continue
            try:
                self._add(request, ended)
            except Exception as error:
                ended.set_result(DiffusionOutput(str(getattr(request, "request_id", "")), error=error))
        self._dispatch_soon()

    def abort(self, request_id: str, ended: Future[DiffusionOutput] | None = None, *, reason: str = "") -> bool:
        """End a request, unless its id means another one than ``ended`` awaits by now.

        Returns:
            Whether it was in flight.
        """
        pending = self._pending.get(request_id)
        if pending is None or (ended is not None and pending.ended is not ended):
            return False
        if pending.call is not None:
            pending.call.cancel()
        if pending.reference is not None:
            # The replica may be gone, or done with it.
            with suppress(Exception):
                ray.cancel(pending.reference)
        self._assignment.finish(request_id)
        self._end(request_id, error=RequestAborted(reason or f"request {request_id!r} was aborted"))
        return True

    async def update_weights(
        self, reference: ray.ObjectRef, kept: Mapping[str, Any], lora_config: Any, adapter_name: str
    ) -> int:
        """Let everything in flight end, write the weights in every replica, and go on.

        Args:
            reference: of the weights in Ray's object store.
            kept: the weights, as they can be put there again.
            lora_config: as for :func:`~omnibatch.ray.weights.write_weights`.
            adapter_name: likewise.

        Returns:
            The new version.

        Raises:
            ValueError: when the replicas refuse the weights.
            RuntimeError: when weights are being updated already.
        """
        if self._updating:
            raise RuntimeError("the weights are being updated already")
        self._updating = True
        try:
            while self._assignment.num_in_flight:
                self._idle.clear()
                await self._idle.wait()
            version = self.weights_version + 1
            update = WeightsUpdate(version, [reference], frozenset(kept), lora_config, adapter_name)
            updates = update.put_into(self._updates)
            first = await self._let_one_take(updates)
            self._updates, self.weights_version = updates, version
            self._sent_weights = {known.version: self._sent_weights.get(known.version, kept) for known in updates}
            others = [self._replicas[name] for name in self._assignment.replicas if name != first]
            await asyncio.gather(*[self._take(replica) for replica in others])
            return version
        finally:
            self._updating = False
            self._dispatch_soon()

    async def _are_up(self, count: int, seconds: float) -> bool:
        """Whether so many replicas are up within so many seconds; raises when one cannot be made."""
        deadline = time.monotonic() + seconds
        while self.num_replicas < count:
            if self._failure is not None:
                raise RuntimeError(f"a replica could not be made: {last_line(self._failure)}") from self._failure
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    async def _let_one_take(self, updates: Sequence[WeightsUpdate]) -> str:
        """Let one replica take the updates, which shows whether the others can, and return its name."""
        while True:
            self._require_replicas()
            for name in self._assignment.replicas:
                try:
                    await call(self._replicas[name].actor.prepare, updates)
                    return name
                except RayTaskError as error:
                    raise error.cause from error
                except RayError:
                    # It died; the next one may tell.
                    self._replicas[name].report()
            await asyncio.sleep(0.1)

    async def _take(self, replica: SupervisedReplica) -> None:
        """Let a replica take the newest weights; one that cannot is started again, and takes them then."""
        try:
            await call(replica.actor.prepare, self._updates)
        except Exception:
            replica.kill(restart=True)
            replica.report()

    def _add(self, request: OmniDiffusionRequest, ended: Future[DiffusionOutput]) -> None:
        if not isinstance(request, OmniDiffusionRequest):
            raise ValueError(f"a request must be an OmniDiffusionRequest, got {type(request).__name__}")
        validate_request_id(request.request_id)
        self._require_replicas()
        pending = PendingRequest(request, with_seed(request), ended)
        work = requested_steps(request) * requested_outputs(request.sampling_params)
        self._assignment.add(request.request_id, group_of(request), work)
        self._pending[request.request_id] = pending

    def _require_replicas(self) -> None:
        if self._failure is not None and not self._replicas:
            raise RuntimeError(f"no replica is left: {last_line(self._failure)}") from self._failure

    def _dispatch_soon(self) -> None:
        if not self._dispatch_is_due:
            self._dispatch_is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_is_due = False
        while not self._updating and (assigned := self._assignment.next()) is not None:
            request_id, name = assigned
            pending = self._pending[request_id]
            pending.call = asyncio.ensure_future(self._run(request_id, pending, self._replicas[name]))

    async def _run(self, request_id: str, pending: PendingRequest, replica: SupervisedReplica) -> None:
        # A name of its own for each sending, so that one that is still being aborted cannot be in the way.
        sent = replace(pending.sent, request_id=f"{request_id} ({next(self._sendings)})")
        try:
            output = await self._send(sent, pending, replica)
        except StaleWeights:
            # It died, and Ray has started it again before anybody noticed.
            replica.report()
        except (RayTaskError, TypeError) as error:
            # Not the replica's fault: what was to be sent, there or back, cannot be.
            reason = error.__cause__ or last_line(error)
            self._assignment.finish(request_id)
            self._end(request_id, error=TypeError(f"the request or its output cannot be sent: {reason}"))
        except Exception:
            replica.report()
        else:
            self._assignment.finish(request_id)
            self._end(request_id, output)

    async def _send(
        self, request: OmniDiffusionRequest, pending: PendingRequest, replica: SupervisedReplica
    ) -> DiffusionOutput:
        if not ray.is_initialized():
            raise ConnectionError("Ray was shut down in this process")
        pending.reference = replica.actor.generate.remote(request, self.weights_version)
        packed = await pending.reference
        try:
            return unpack_output(packed)
        except Exception as error:
            return DiffusionOutput(request.request_id, error=TypeError(f"the output cannot be read here: {error}"))

    def _end(self, request_id: str, output: DiffusionOutput | None = None, error: Exception | None = None) -> None:
        """Hand over the output of a request that the assignment has forgotten."""
        pending = self._pending.pop(request_id)
        output = output or DiffusionOutput(request_id, error=error)
        output.request_id = request_id
        if output.error is None:
            output.sampling_params = pending.given.sampling_params
        pending.ended.set_result(output)
        if not self._assignment.num_in_flight:
            self._idle.set()
        self._dispatch_soon()

    async def _keep(self, replica: SupervisedReplica) -> None:
        """Look after a replica, from one life to the next."""
        try:
            while True:
                updates = None
                while updates is not self._updates:
                    updates = self._updates
                    await replica.bring_up(updates)
                self._assignment.add_replica(replica.name)
                self._dispatch_soon()
                await replica.until_lost(lambda: bool(self._assignment.on(replica.name)))
                self._lose(replica)
        except Exception as error:
            replica.kill(restart=False)
            del self._replicas[replica.name]
            self._failure = error
            if not self._replicas:
                for request_id in list(self._pending):
                    self._assignment.finish(request_id)
                    self._end(request_id, error=RuntimeError(f"no replica is left: {last_line(error)}"))
            if self._started:
                warnings.warn(f"{replica.name} is given up: {last_line(error)}", stacklevel=2)

    def _lose(self, replica: SupervisedReplica) -> None:
        for request_id in self._assignment.on(replica.name):
            pending = self._pending[request_id]
            if pending.call is not None:
                pending.call.cancel()
            pending.call = pending.reference = None
        for request_id in self._assignment.lose_replica(replica.name):
            message = f"request {request_id!r} brought its replica down each time it ran"
            self._end(request_id, error=RuntimeError(message))
        if not self._assignment.num_in_flight:
            self._idle.set()
        self._dispatch_soon()

    def _send_weights_again(self) -> None:
        """Put the weights into the store of a Ray that was restarted."""
        self._updates = [
            update._replace(weights=[ray.put(self._sent_weights[update.version])]) for update in self._updates
        ]


def last_line(error: Exception) -> str:
    """What an error of another process comes down to; the lines before are its traceback."""
    return str(error).strip().splitlines()[-1]
