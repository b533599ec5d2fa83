"""The loop: admit requests, run their next step, return what ended, keep faults where they belong."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.dispatch import missing_step_methods, require_mode, wave_size
from omnibatch.packed_forward import run_wave
from omnibatch.request import (
    DiffusionOutput,
    OmniDiffusionRequest,
    RequestAborted,
    RolloutError,
    request_list,
    requested_steps,
    validate_request_id,
)
from omnibatch.runner import LifecycleRunner
from omnibatch.scheduler import RequestScheduler, StepScheduler
from omnibatch.step_state import StepRequestState
from omnibatch.timeline import Timeline


class Progress(NamedTuple):
    """Where a call stands: denoising steps done and in all, requests in flight and ended."""

    steps_done: int
    total_steps: int
    in_flight: int
    ended: int


class RolloutEngine:
    """Runs rollout requests through an adapter in the mode that the configuration names.

    Every mode is the same loop; only admission differs. Step-wise lets a request join whenever a place is free,
    request-level starts a wave when the one before has ended, serial is a wave of one.

    Use it from one thread, or through :class:`~omnibatch.AsyncRolloutEngine`.

    Args:
        adapter: what runs the model.
        config: how requests are packed.
        timeline: filled with every step that is run.

    Attributes:
        weights_version: how often the weights were updated through :meth:`update_weights`.
        steps_done: denoising steps that all requests together have taken.

    Raises:
        ValueError: when the adapter lacks what the mode needs.
    """

    def __init__(
        self, adapter: RolloutAdapter | Any, config: RolloutConfig | None = None, *, timeline: Timeline | None = None
    ):
        self.adapter = adapter
        self.config = RolloutConfig.of(config)
        self._runner = None if missing_step_methods(adapter) else LifecycleRunner(adapter, self.config, timeline)
        if self._runner is None and not callable(getattr(adapter, "forward", None)):
            raise ValueError(
                f"adapter must have the step lifecycle or a forward(), got {type(adapter).__name__}; "
                "omnibatch.load wraps a pipeline in its adapter"
            )
        self.scheduler: StepScheduler
        if self.config.mode is ExecutionMode.STEP:
            require_mode(adapter, ExecutionMode.STEP)
            self.scheduler = StepScheduler(self.config.max_num_seqs)
        else:
            self.scheduler = RequestScheduler(
                wave_size(adapter, self.config.max_num_seqs), self.config.request_batch_max_wait_ms
            )
        self._waiting: dict[str, tuple[OmniDiffusionRequest, float]] = {}
        self._running: dict[str, StepRequestState] = {}
        self._ended: dict[str, DiffusionOutput] = {}
        self._claimed: set[str] = set()
        self.weights_version = 0
        self.steps_done = 0
        self._closed = self._paused = False

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is in flight, or has an output that nobody has taken and no stream waits for."""
        return self.scheduler.has_unfinished or bool(self._ended.keys() - self._claimed)

    def submit(self, request: OmniDiffusionRequest) -> str:
        """Queue a request and return its id. What is wrong with it shows in its output, not here.

        Raises:
            ValueError: when the id is empty or still in flight.
            RuntimeError: when the engine is closed.
        """
        self._require_open()
        if not isinstance(request, OmniDiffusionRequest):
            raise ValueError(f"a request must be an OmniDiffusionRequest, got {type(request).__name__}")
        validate_request_id(request.request_id)
        if request.request_id in self._ended:
            raise ValueError(f"request_id {request.request_id!r} is already in flight: its output was not taken yet")
        self.scheduler.add(request.request_id, self._shape_key(request))
        self._waiting[request.request_id] = (request, time.perf_counter())
        return request.request_id

    def abort(self, request_id: str) -> bool:
        """End a request now; its output carries a :class:`~omnibatch.request.RequestAborted`.

        Returns:
            Whether the request was in flight. Aborting twice, or after the end, does nothing.
        """
        if request_id not in self._waiting and request_id not in self._running:
            return False
        self._fail(request_id, RequestAborted(f"request {request_id!r} was aborted"))
        return True

    def step(self) -> list[DiffusionOutput]:
        """Admit what may start, run one denoising step of everything in flight, and return what ended."""
        time.sleep(self.wait_seconds())
        self._tick()
        return self.take_ended()

    def take_ended(self) -> list[DiffusionOutput]:
        """Outputs that have ended and that no stream waits for, without running anything."""
        return self._take([request_id for request_id in self._ended if request_id not in self._claimed])

    def stream(
        self,
        requests: Iterable[OmniDiffusionRequest],
        *,
        progress: bool = False,
        on_step: Callable[[Progress], None] | None = None,
    ) -> Iterator[DiffusionOutput]:
        """Run requests and yield each output as it ends, failed ones with ``error`` set.

        Closing the iterator early aborts what has not ended.

        Args:
            requests: any number, in any mix.
            progress: show a bar over denoising steps.
            on_step: called after every step of the engine.
        """
        for _, output in self._run(requests, progress, on_step):
            yield output

    def generate(
        self,
        requests: Iterable[OmniDiffusionRequest],
        *,
        return_errors: bool = False,
        progress: bool = False,
        on_step: Callable[[Progress], None] | None = None,
    ) -> list[DiffusionOutput]:
        """Run requests to their end.

        Args:
            requests: any number, in any mix.
            return_errors: return failed requests in their place, with ``error`` set, instead of raising.
            progress: show a bar over denoising steps.
            on_step: called after every step of the engine.

        Returns:
            One output per request, in the order given.

        Raises:
            RolloutError: after everything has ended, when a request failed; it carries all outputs.
        """
        outputs = [output for _, output in sorted(self._run(requests, progress, on_step), key=lambda pair: pair[0])]
        if not return_errors and any(output.error is not None for output in outputs):
            raise RolloutError(outputs)
        return outputs

    @contextmanager
    def update_weights(self, *, abort_running: bool = False) -> Iterator[None]:
        """Within this context the weights may change: nothing runs, and what is submitted waits until it ends.

        Requests in flight run to their end first, or are aborted, so that no trajectory mixes weights; outputs carry
        the version they were made with. Cached prompts are encoded anew afterwards.

        Args:
            abort_running: end requests in flight with a :class:`~omnibatch.request.RequestAborted` instead of waiting.

        Raises:
            RuntimeError: when the weights are being updated already.
        """
        if self._paused:
            raise RuntimeError("the weights are being updated already")
        self._paused = True
        try:
            if abort_running:
                for request_id in list(self._running):
                    self.abort(request_id)
            while self._running:
                self._tick()
            yield
        finally:
            self._paused = False
            self.weights_version += 1
            if hasattr(self.adapter, "forget_prompts"):
                self.adapter.forget_prompts()

    def close(self) -> list[DiffusionOutput]:
        """End everything in flight with an error, refuse new requests, and return the outputs nobody has taken."""
        self._closed = True
        for request_id in [*self._running, *self._waiting]:
            self._fail(request_id, RequestAborted(f"the engine was closed before request {request_id!r} ended"))
        return self._take(list(self._ended))

    def wait_seconds(self) -> float:
        """How long the engine would wait for more arrivals before it runs anything."""
        return 0.0 if self._running else self.scheduler.wait_seconds()

    def _run(
        self, requests: Iterable[OmniDiffusionRequest], progress: bool, on_step: Callable[[Progress], None] | None
    ) -> Iterator[tuple[int, DiffusionOutput]]:
        """Run requests and give each output with its request's place in the list."""
        requests = request_list(requests)
        place_of: dict[str, int] = {}
        refused = []
        before = self.steps_done
        try:
            for place, request in enumerate(requests):
                try:
                    request_id = self.submit(request)
                    place_of[request_id] = place
                    self._claimed.add(request_id)
                except ValueError as error:
                    name = str(getattr(request, "request_id", place))
                    refused.append((place, DiffusionOutput(name, error=error)))
            total = sum(requested_steps(requests[place]) for place in place_of.values())
            yield from refused
            with tqdm(total=total, unit="step", disable=not progress, desc="denoising", leave=False) as bar:
                while place_of:
                    self._require_open()
                    if self._paused:
                        raise RuntimeError("nothing can be run while the weights are being updated")
                    time.sleep(self.wait_seconds())
                    self._tick()
                    bar.set_postfix(in_flight=len(self._running), refresh=False)
                    bar.update(self.steps_done - before - bar.n)
                    ended = self._take([request_id for request_id in self._ended if request_id in place_of])
                    pairs = [(place_of.pop(output.request_id), output) for output in ended]
                    if on_step is not None:
                        done = len(requests) - len(place_of)
                        on_step(Progress(self.steps_done - before, total, len(self._running), done))
                    yield from pairs
        finally:
            # Whatever stopped the loop, nothing of this call stays in flight.
            for request_id in place_of:
                self.abort(request_id)
            self._take([request_id for request_id in place_of if request_id in self._ended])
            self._claimed -= place_of.keys()

    def _tick(self) -> None:
        if not self._paused:
            self.scheduler.schedule()
        # Not only what was admitted now: an interrupt may have come between admitting and preparing.
        admitted = [request_id for request_id in self.scheduler.running if request_id not in self._running]
        if self._runner is None:
            if admitted:
                self._forward(admitted)
            return
        for request_id in admitted:
            request, submitted = self._waiting[request_id]
            try:
                self._running[request_id] = self._runner.prepare(request, waited=time.perf_counter() - submitted)
                del self._waiting[request_id]
            except Exception as error:
                self._fail(request_id, error)
        active = [state for state in self._running.values() if not state.denoise_completed]
        self.steps_done += len(active)
        for state, fault in self._runner.advance(active):
            self._fail(state.request_id, fault)
        completed = [state for state in self._running.values() if state.denoise_completed]
        for state, result in self._runner.finish(completed):
            self._end(
                result if isinstance(result, DiffusionOutput) else DiffusionOutput(state.request_id, error=result)
            )

    def _forward(self, admitted: list[str]) -> None:
        """Run a wave through an adapter that brings its own ``forward()`` and no lifecycle."""
        requests = [self._waiting[request_id][0] for request_id in admitted]
        for request, output in zip(requests, run_wave(self.adapter, requests)):
            if output.error is None:
                self.steps_done += requested_steps(request)
            self._end(output)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _take(self, request_ids: list[str]) -> list[DiffusionOutput]:
        self._claimed -= set(request_ids)
        return [self._ended.pop(request_id) for request_id in request_ids]

    def _fail(self, request_id: str, error: Exception) -> None:
        self._end(DiffusionOutput(request_id, error=error))

    def _end(self, output: DiffusionOutput) -> None:
        self.scheduler.finish(output.request_id)
        self._waiting.pop(output.request_id, None)
        state = self._running.pop(output.request_id, None)
        if state is not None and self._runner is not None:
            self._runner.forget(state)
        output.weights_version = self.weights_version
        self._ended[output.request_id] = output

    def _shape_key(self, request: OmniDiffusionRequest) -> Hashable:
        try:
            if hasattr(self.adapter, "shape_key"):
                key = self.adapter.shape_key(request)
            else:
                key = request.sampling_params.height, request.sampling_params.width
            hash(key)
            return key
        except Exception:
            # The request is malformed; preparing it will say how, in its own output.
            return None
