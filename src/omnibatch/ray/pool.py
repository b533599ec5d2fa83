"""The pool as its users see it, from any thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from tqdm import tqdm

from omnibatch.adapters import load
from omnibatch.config import RolloutConfig
from omnibatch.ray.coordinator import Coordinator
from omnibatch.ray.replica import Replica
from omnibatch.ray.transfer import to_bytes
from omnibatch.ray.weights import require_weights
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest, RolloutError, request_list
from omnibatch.validation import is_finite, require_positive_integer

T = TypeVar("T")


class RolloutPool:
    """Rollouts on several replicas of a model, each an engine in a Ray actor on its own device.

    The results are those of one engine, to the bit when the configuration fixes ``rows_per_forward``, wherever a
    request runs; on a CPU, those of an engine with one thread (``torch.set_num_threads(1)``), as each replica has. A
    request whose replica dies or hangs runs again; one that is alone on its replica when that dies, for the third time
    or later, fails. A ``torch.Generator`` is sent as it stands; your own does not go on. Connects to Ray if the process
    is not connected yet, and leaves it running.

    Args:
        model: the name of an embedded model, a diffusers folder, a hub id, or a function without arguments that makes
            an adapter, which is called in every actor.
        algorithm: the training algorithm that reads the rollouts.
        config: of every engine.
        num_replicas: actors. Those for which there is no room yet join when there is.
        ray_actor_options: what Ray is to reserve for an actor and how it is placed, as ``ray.remote`` takes it; by
            default one GPU if the cluster has any, else one CPU.
        health_check_timeout_s: a replica that gives no sign of life for so many seconds, or takes no step while it has
            requests, is killed and started again. It must be longer than a step, encoding and decoding included; for an
            adapter that brings only a ``forward()``, longer than a wave.

    Raises:
        ValueError: naming the argument that is wrong.
        RuntimeError: when a replica cannot be made, with what its process said.

    Example:
        >>> def rollouts(requests, trained_weights):
        ...     with RolloutPool("tiny-sd35", num_replicas=2) as pool:
        ...         pool.update_weights(trained_weights)
        ...         return pool.generate(requests, progress=True)
    """

    def __init__(
        self,
        model: str | Path | Callable[[], Any],
        algorithm: str = "flow_grpo",
        config: RolloutConfig | None = None,
        num_replicas: int = 1,
        *,
        ray_actor_options: Mapping[str, Any] | None = None,
        health_check_timeout_s: float = 300.0,
    ):
        require_positive_integer("num_replicas", num_replicas)
        if not callable(model) and not isinstance(model, (str, Path)):
            raise ValueError(
                f"model must be a name, a folder, a hub id or a function that makes an adapter, got {model!r}"
            )
        if not is_finite(health_check_timeout_s) or health_check_timeout_s <= 0:
            raise ValueError(f"health_check_timeout_s must be a positive number, got {health_check_timeout_s!r}")
        self.config = RolloutConfig.of(config)
        make_adapter = model if callable(model) else partial(load, model, algorithm)
        make_actor = partial(_make_actor, make_adapter, self.config, dict(ray_actor_options or {}))
        # What runs and as much again, so that a replica need not wait for the pool.
        capacity = 2 * self.config.max_num_seqs
        self._coordinator = Coordinator(make_actor, capacity, num_replicas, health_check_timeout_s)
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omnibatch-pool", daemon=True)
        self._thread.start()
        try:
            self._call(self._coordinator.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_replicas(self) -> int:
        """Replicas that take requests now."""
        return self._coordinator.num_replicas

    @property
    def weights_version(self) -> int:
        """Of the weights that requests are run with."""
        return self._coordinator.weights_version

    def stream(self, requests: Iterable[OmniDiffusionRequest], *, progress: bool = False) -> Iterator[DiffusionOutput]:
        """Run requests and yield each output as it ends, failed ones with ``error`` set.

        Closing the iterator early aborts what has not ended.

        Args:
            requests: any number, in any mix.
            progress: show a bar over requests.
        """
        for _, output in self._run(requests, progress):
            yield output

    def generate(
        self, requests: Iterable[OmniDiffusionRequest], *, return_errors: bool = False, progress: bool = False
    ) -> list[DiffusionOutput]:
        """Run requests to their end.

        Args:
            requests: any number, in any mix.
            return_errors: return failed requests in their place, with ``error`` set, instead of raising.
            progress: show a bar over requests.

        Returns:
            One output per request, in the order given.

        Raises:
            RolloutError: after everything has ended, when a request failed; it carries all outputs.
        """
        outputs = [output for _, output in sorted(self._run(requests, progress), key=lambda pair: pair[0])]
        if not return_errors and any(output.error is not None for output in outputs):
            raise RolloutError(outputs)
        return outputs

    async def generate_async(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        """Run one request beside whatever else runs; cancelling the task aborts it.

        Raises:
            Exception: whatever ended the request: its own fault, a :class:`~omnibatch.request.RequestAborted`.
        """
        (ended,) = self._submit([request])
        try:
            output = await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            self._abort_soon(request, ended)
            raise
        if output.error is not None:
            raise output.error
        return output

    def abort(self, request_id: str) -> bool:
        """End a request now; its output carries a :class:`~omnibatch.request.RequestAborted`.

        Returns:
            Whether the request was in flight.
        """

        async def abort() -> bool:
            return self._coordinator.abort(request_id)

        return self._call(abort())

    def update_weights(
        self, state_dict: Mapping[str, torch.Tensor], *, lora_config: Any = None, adapter_name: str = "default"
    ) -> int:
        """Give every replica's transformer new weights, which are put into Ray's object store once.

        Requests in flight end first, with the weights that they began with; those that wait run with the new ones, and
        outputs carry the version. A replica that is started again later gets them too.

        Args:
            state_dict: weights by the transformer's names, all or some; or, with ``lora_config``, a LoRA as
                ``peft.get_peft_model_state_dict`` gives it.
            lora_config: the LoRA's ``peft.LoraConfig``; replicas without that adapter add it.
            adapter_name: of the LoRA.

        Returns:
            The new version.

        Raises:
            ValueError: naming what is no tensor, or a weight that the transformer lacks or has in another shape;
                nothing has changed then.
            RuntimeError: when weights are being updated already, or the pool is closed.
        """
        require_weights(state_dict, lora_config)
        reference = ray.put({name: to_bytes(tensor) for name, tensor in state_dict.items()})
        # The very bytes that lie in the store; they outlive it, in case Ray is restarted.
        kept = ray.get(reference)
        return self._call(self._coordinator.update_weights(reference, kept, lora_config, adapter_name))

    def close(self) -> None:
        """End everything in flight with an error and stop the replicas."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._coordinator.close()
        asyncio.run_coroutine_threadsafe(self._coordinator.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the pool is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the pool is closed") from None

    def _submit(self, requests: Sequence[OmniDiffusionRequest]) -> list[Future[DiffusionOutput]]:
        ended: list[Future[DiffusionOutput]] = [Future() for _ in requests]
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._loop.call_soon_threadsafe(self._coordinator.add, list(zip(requests, ended)))
        return ended

    def _abort_soon(self, request: OmniDiffusionRequest, ended: Future[DiffusionOutput]) -> None:
        # A closed pool has ended it already.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._coordinator.abort, request.request_id, ended)

    def _run(self, requests: Iterable[OmniDiffusionRequest], progress: bool) -> Iterator[tuple[int, DiffusionOutput]]:
        """Run requests and give each output with its request's place in the list."""
        requests = request_list(requests)
        arrived: queue.SimpleQueue[Future[DiffusionOutput]] = queue.SimpleQueue()
        place_of = {ended: place for place, ended in enumerate(self._submit(requests))}
        for ended in list(place_of):
            ended.add_done_callback(arrived.put)
        try:
            with tqdm(total=len(requests), unit="request", desc="rollouts", disable=not progress, leave=False) as bar:
                while place_of:
                    ended = arrived.get()
                    place = place_of.pop(ended)
                    bar.set_postfix(replicas=self.num_replicas, refresh=False)
                    bar.update()
                    yield place, ended.result()
        finally:
            for ended, place in place_of.items():
                self._abort_soon(requests[place], ended)


def _make_actor(make_adapter: Callable[[], Any], config: RolloutConfig, options: dict[str, Any]) -> Any:
    defaults: dict[str, Any] = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    # Ray restarts the actor; its requests are handed out anew, since only the pool can tell whom to suspect.
    defaults |= {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 2 * config.max_num_seqs + 64}
    return ray.remote(**(defaults | options))(Replica).remote(make_adapter, config)
