"""The loop: admit requests, run their next step, return what finished, keep faults where they belong."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Sequence

import torch
from tqdm import tqdm

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.dispatch import missing_step_methods, require_mode, supported_modes
from omnibatch.request import (
    DiffusionOutput,
    OmniDiffusionRequest,
    RequestAborted,
    RolloutError,
    validate_request_id,
)
from omnibatch.request_batch import DiffusionRequestBatch, split_diffusion_output_by_request
from omnibatch.scheduler import RequestScheduler, StepScheduler
from omnibatch.step_batch import StepBatch, StepRequestState


class RolloutEngine:
    """Runs rollout requests through an adapter in the mode that the configuration names.

    Every mode is the same loop; only admission differs. Step-wise lets a request join whenever a place is free,
    request-level starts a wave when the one before has ended, serial is a wave of one.

    Args:
        adapter: what runs the model.
        config: how requests are packed.

    Raises:
        ValueError: when the adapter lacks what the mode needs.
    """

    def __init__(self, adapter: RolloutAdapter, config: RolloutConfig | None = None):
        self.adapter = adapter
        self.config = config or RolloutConfig()
        self._decode_rows = self.config.decode_rows or (1 if self.config.rows_per_forward else 8)
        self._has_lifecycle = not missing_step_methods(adapter)
        self.scheduler: StepScheduler
        if self.config.mode is ExecutionMode.STEP:
            require_mode(adapter, ExecutionMode.STEP)
            self.scheduler = StepScheduler(self.config.max_num_seqs)
        else:
            self.scheduler = RequestScheduler(self._wave_size(), self.config.request_batch_max_wait_ms)
        self._waiting: dict[str, tuple[OmniDiffusionRequest, float]] = {}
        self._running: dict[str, StepRequestState] = {}
        self._batches: dict[Hashable, StepBatch] = {}
        self._ended: list[DiffusionOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request has not been returned yet."""
        return self.scheduler.has_unfinished or bool(self._ended)

    def submit(self, request: OmniDiffusionRequest) -> str:
        """Queue a request and return its id. Its own faults show in its output, not here.

        Raises:
            ValueError: when the id is empty or already in flight.
        """
        validate_request_id(request.request_id)
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
        admitted = self._admit()
        if self._has_lifecycle:
            for request_id in admitted:
                self._prepare(request_id)
            for batch in self._current_batches():
                self._advance(batch)
            self._decode_completed()
        elif admitted:
            self._forward(admitted)
        ended, self._ended = self._ended, []
        return ended

    def generate(
        self, requests: Sequence[OmniDiffusionRequest], *, return_errors: bool = False, progress: bool = False
    ) -> list[DiffusionOutput]:
        """Run requests to their end.

        Args:
            requests: any number, in any mix.
            return_errors: return failed requests in their place, with ``error`` set, instead of raising.
            progress: show a bar over denoising steps.

        Returns:
            One output per request, in the order given.

        Raises:
            RolloutError: after everything has ended, when a request failed; it carries all outputs.
        """
        outputs: list[DiffusionOutput | None] = [None] * len(requests)
        index_of: dict[str, int] = {}
        for index, request in enumerate(requests):
            try:
                index_of[self.submit(request)] = index
            except ValueError as error:
                outputs[index] = DiffusionOutput(str(request.request_id), error=error)
        total = sum(requests[index].sampling_params.num_inference_steps for index in index_of.values())
        not_ours: list[DiffusionOutput] = []
        try:
            with tqdm(total=total, unit="step", disable=not progress, desc="denoising") as bar:
                while index_of:
                    in_flight = len(self._running)
                    ended = self.step()
                    bar.set_postfix(in_flight=len(self._running), refresh=False)
                    bar.update(max(in_flight, len(self._running)))
                    for output in ended:
                        if output.request_id in index_of:
                            outputs[index_of.pop(output.request_id)] = output
                        else:
                            not_ours.append(output)
        finally:
            # Whatever stopped the loop, nothing of this call stays in flight and nothing of others is lost.
            for request_id in index_of:
                self.abort(request_id)
            self._ended = not_ours + [output for output in self._ended if output.request_id not in index_of]
        results = [output for output in outputs if output is not None]
        if not return_errors and any(output.error is not None for output in results):
            raise RolloutError(results)
        return results

    def _shape_key(self, request: OmniDiffusionRequest) -> Hashable:
        try:
            if hasattr(self.adapter, "shape_key"):
                return self.adapter.shape_key(request)
            return request.sampling_params.height, request.sampling_params.width
        except Exception:
            # The request is malformed; preparing it will say how, in its own output.
            return None

    def _wave_size(self) -> int:
        size = self.config.max_num_seqs
        if size > 1 and ExecutionMode.REQUEST not in supported_modes(self.adapter):
            warnings.warn(
                f"{type(self.adapter).__name__} does not set supports_request_batch = True: its requests run one by "
                f"one, and max_num_seqs = {size} has no effect",
                stacklevel=3,
            )
            return 1
        return size

    def _admit(self) -> list[str]:
        wait = self.scheduler.wait_seconds()
        if wait and not self._running:
            time.sleep(wait)
        return self.scheduler.schedule()

    def _prepare(self, request_id: str) -> None:
        request, submitted = self._waiting[request_id]
        state = StepRequestState(request)
        started = time.perf_counter()
        state.stage_times["queue"] = started - submitted
        try:
            with torch.no_grad():
                self.adapter.prepare_encode(state)
        except Exception as error:
            self._fail(request_id, error)
            return
        state.stage_times["encode"] = time.perf_counter() - started
        state.stage_times["denoise"] = 0.0
        del self._waiting[request_id]
        self._running[request_id] = state

    def _forward(self, admitted: list[str]) -> None:
        """Run a wave through an adapter that brings its own ``forward()`` and no lifecycle."""
        requests = []
        for request_id in admitted:
            request, _ = self._waiting[request_id]
            try:
                request.validate()
                requests.append(request)
            except ValueError as error:
                self._fail(request_id, error)
        if not requests:
            return
        takes_batches = ExecutionMode.REQUEST in supported_modes(self.adapter)
        try:
            with torch.no_grad():
                result = self.adapter.forward(DiffusionRequestBatch(requests) if takes_batches else requests[0])
            if isinstance(result, DiffusionOutput):
                counts = [request.sampling_params.num_outputs_per_prompt for request in requests]
                result = split_diffusion_output_by_request(
                    result, DiffusionRequestBatch(requests), num_outputs_per_prompt=counts
                )
            if len(result) != len(requests):
                raise ValueError(f"forward() must return an output per request, {len(requests)}, got {len(result)}")
        except Exception as error:
            for request in requests:
                self._fail(request.request_id, error)
            return
        for request, output in zip(requests, result):
            output.request_id = request.request_id
            self._end(output)

    def _current_batches(self) -> list[StepBatch]:
        """One batch per latent shape, kept from the tick before where its members are the same."""
        members: dict[Hashable, list[StepRequestState]] = {}
        for state in self._running.values():
            members.setdefault(state.shape_key, []).append(state)
        kept = self._batches
        self._batches = {}
        for key, states in members.items():
            batch = kept.get(key)
            if batch is None or batch.states != states:
                batch = StepBatch(states, self.config.rows_per_forward)
            self._batches[key] = batch
        return list(self._batches.values())

    def _advance(self, batch: StepBatch) -> None:
        started = time.perf_counter()
        try:
            with torch.no_grad():
                batch.gather()
                self.adapter.step_scheduler(batch, self.adapter.denoise_step(batch))
        except Exception as error:
            for state in batch.states:
                self._fail(state.request_id, error)
            return
        elapsed = time.perf_counter() - started
        rows = max(len(forward.source) for forward in batch.forwards)
        for state in batch.states:
            state.stage_times["denoise"] += elapsed
            state.rows_per_forward = max(state.rows_per_forward, rows)

    def _decode_completed(self) -> None:
        completed: dict[Hashable, list[StepRequestState]] = {}
        for state in self._running.values():
            if state.denoise_completed:
                completed.setdefault(state.shape_key, []).append(state)
        for states in completed.values():
            try:
                self._decode(states)
            except Exception:
                # One of them is at fault; alone, each shows whether it is.
                for state in states:
                    try:
                        self._decode([state])
                    except Exception as error:
                        self._fail(state.request_id, error)

    def _decode(self, states: list[StepRequestState]) -> None:
        started = time.perf_counter()
        with torch.no_grad():
            self.adapter.post_decode(states, self._decode_rows)
            outputs = [state.to_output() for state in states]
        elapsed = time.perf_counter() - started
        for output in outputs:
            output.stage_times["decode"] = elapsed
            self._end(output)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._end(DiffusionOutput(request_id, error=error))

    def _end(self, output: DiffusionOutput) -> None:
        self.scheduler.finish(output.request_id)
        self._waiting.pop(output.request_id, None)
        self._running.pop(output.request_id, None)
        self._ended.append(output)
