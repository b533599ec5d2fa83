"""The loop: admit requests, run their next step, return what finished, keep faults where they belong."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import torch
from tqdm import tqdm

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.dispatch import require_mode
from omnibatch.request import (
    DiffusionOutput,
    OmniDiffusionRequest,
    RequestAborted,
    RolloutError,
    validate_request_id,
)
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
        require_mode(adapter, self.config.mode)
        self.scheduler: StepScheduler
        if self.config.mode is ExecutionMode.STEP:
            self.scheduler = StepScheduler(self.config.max_num_seqs)
        else:
            self.scheduler = RequestScheduler(self.config.max_num_seqs, self.config.request_batch_max_wait_ms)
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
        self._admit()
        for batch in self._current_batches():
            self._advance(batch)
        self._decode_completed()
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
            return self.adapter.shape_key(request)
        except Exception:
            # The request is malformed; preparing it will say how, in its own output.
            return None

    def _admit(self) -> None:
        wait = self.scheduler.wait_seconds()
        if wait and not self._running:
            time.sleep(wait)
        for request_id in self.scheduler.schedule():
            request, submitted = self._waiting[request_id]
            state = StepRequestState(request)
            started = time.perf_counter()
            state.stage_times["queue"] = started - submitted
            try:
                with torch.no_grad():
                    self.adapter.prepare_encode(state)
            except Exception as error:
                self._fail(request_id, error)
                continue
            state.stage_times["encode"] = time.perf_counter() - started
            state.stage_times["denoise"] = 0.0
            del self._waiting[request_id]
            self._running[request_id] = state

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
        for state in [state for state in self._running.values() if state.denoise_completed]:
            started = time.perf_counter()
            try:
                with torch.no_grad():
                    self.adapter.post_decode([state])
                    output = state.to_output()
            except Exception as error:
                self._fail(state.request_id, error)
                continue
            state.stage_times["decode"] = time.perf_counter() - started
            self._end(output)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._end(DiffusionOutput(request_id, error=error))

    def _end(self, output: DiffusionOutput) -> None:
        self.scheduler.finish(output.request_id)
        self._waiting.pop(output.request_id, None)
        self._running.pop(output.request_id, None)
        self._ended.append(output)
