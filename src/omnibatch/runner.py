"""Running the step lifecycle: prepare requests, take one step with all of them, decode those that are done."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.config import RolloutConfig
from omnibatch.memory import activation_bytes_per_row, available_bytes, bytes_in_words
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest
from omnibatch.step_batch import StepBatch, padded_text_length
from omnibatch.step_state import StepRequestState
from omnibatch.timeline import Timeline, TimelineStep

DEFAULT_DECODE_ROWS = 8


class LifecycleRunner:
    """Calls an adapter's four lifecycle methods for requests in flight, and says which of them failed.

    Args:
        adapter: has the four methods.
        config: rows of a transformer call and of a VAE call. Both are halved when the device runs out of memory.
        timeline: filled with every step that is run, if given.
    """

    def __init__(self, adapter: Any, config: RolloutConfig, timeline: Timeline | None):
        self.adapter = adapter
        self.timeline = timeline
        self.rows_per_forward = config.rows_per_forward
        self.decode_rows = config.decode_rows or (1 if config.rows_per_forward else DEFAULT_DECODE_ROWS)
        self._batches: dict[Hashable, StepBatch] = {}
        self._told_of_memory = False
        self._largest_checked = 0
        self._ticks = 0
        self._first_step_at: float | None = None

    @torch.no_grad()
    def prepare(self, request: OmniDiffusionRequest, waited: float) -> StepRequestState:
        """Make a request's state, ready for its first step.

        Raises:
            Exception: whatever ``prepare_encode`` raises.
        """
        state = StepRequestState(request)
        started = time.perf_counter()
        self.adapter.prepare_encode(state)
        encode = time.perf_counter() - started
        state.stage_times = {"queue": waited, "encode": encode, "denoise": 0.0, "decode": 0.0}
        return state

    def advance(self, states: Iterable[StepRequestState]) -> Iterator[tuple[StepRequestState, Exception]]:
        """Take one denoising step with every state; states of one shape step together.

        Returns:
            The states that failed and why: all that shared a forward with the fault.
        """
        members: dict[Hashable, list[StepRequestState]] = {}
        for state in states:
            members.setdefault(state.shape_key, []).append(state)
        kept, self._batches = self._batches, {}
        for key, group in members.items():
            started = time.perf_counter()
            steps = [state.step_index for state in group]
            try:
                batch = self._batches[key] = self._batch(group, kept.get(key))
                with torch.no_grad():
                    self.adapter.step_scheduler(batch, self._denoise(batch))
            except Exception as error:
                yield from [(state, error) for state in group]
            else:
                self._record(batch, steps, started, time.perf_counter() - started)
        self._ticks += 1

    def finish(
        self, states: Iterable[StepRequestState]
    ) -> Iterator[tuple[StepRequestState, DiffusionOutput | Exception]]:
        """Decode states that are done; states of one shape are decoded together.

        Returns:
            Each state with its output, or with what went wrong.
        """
        groups: dict[Hashable, list[StepRequestState]] = {}
        for state in states:
            finite = torch.isfinite(state.latents).flatten(1).all(dim=1).tolist()
            broken = [str(seed) for seed, is_finite in zip(state.seeds, finite) if not is_finite]
            if broken:
                yield state, FloatingPointError(f"the latents with seed {', '.join(broken)} are not finite")
            else:
                groups.setdefault(state.shape_key, []).append(state)
        for group in groups.values():
            try:
                yield from zip(group, self._decode(group))
            except Exception:
                # One of them is at fault; alone, each shows whether it is.
                for state in group:
                    try:
                        (output,) = self._decode([state])
                        yield state, output
                    except Exception as error:
                        yield state, error

    def forget(self, state: StepRequestState) -> None:
        """Let go of a state that leaves before its end."""
        self._batches.pop(state.shape_key, None)

    def _batch(self, states: list[StepRequestState], previous: StepBatch | None) -> StepBatch:
        """The batch of the step before where its members are the same, else a new one."""
        if previous is not None and previous.fits(states):
            return previous
        batch = StepBatch(states, self.rows_per_forward)
        self._warn_if_too_large(batch)
        return batch

    def _denoise(self, batch: StepBatch) -> torch.Tensor:
        """Run the batch's transformer calls, with fewer rows each when the device has no memory for them."""
        batch.gather()
        while True:
            try:
                return self.adapter.denoise_step(batch)
            except torch.OutOfMemoryError:
                if batch.largest_forward == 1:
                    raise
            # Outside the handler, where the failed call's tensors are no longer held.
            self.rows_per_forward = batch.largest_forward // 2
            self._tell_of_memory("rows_per_forward", self.rows_per_forward)
            batch.lay_out(self.rows_per_forward)

    @torch.no_grad()
    def _decode(self, states: list[StepRequestState]) -> list[DiffusionOutput]:
        started = time.perf_counter()
        while True:
            try:
                self.adapter.post_decode(states, self.decode_rows)
                break
            except torch.OutOfMemoryError:
                if self.decode_rows == 1:
                    raise
            self.decode_rows //= 2
            self._tell_of_memory("decode_rows", self.decode_rows)
        outputs = [state.to_output() for state in states]
        elapsed = time.perf_counter() - started
        for state in states:
            state.stage_times["decode"] = elapsed
        return outputs

    def _record(self, batch: StepBatch, steps: list[int], started: float, elapsed: float) -> None:
        for state, rows in zip(batch.states, batch.largest_forward_of):
            state.stage_times["denoise"] += elapsed
            state.rows_per_forward = max(state.rows_per_forward, rows)
        if self.timeline is None:
            return
        if self._first_step_at is None:
            self._first_step_at = started
        since = started - self._first_step_at
        self.timeline.steps += [
            TimelineStep(self._ticks, state.request_id, step, state.num_outputs, batch.num_rows, since, elapsed)
            for state, step in zip(batch.states, steps)
        ]

    def _warn_if_too_large(self, batch: StepBatch) -> None:
        """Say so before a call that the estimate says will not fit, once for each new largest call."""
        if batch.largest_forward <= self._largest_checked or not isinstance(self.adapter, RolloutAdapter):
            return
        self._largest_checked = batch.largest_forward
        # As it would be with rows_per_forward, so that who follows the advice is not warned again.
        text_length = padded_text_length(max(rows.prompt_embeds.shape[1] for rows in batch.forwards))
        per_row = activation_bytes_per_row(self.adapter, *batch.states[0].image_size, text_length)
        needed, available = per_row * batch.largest_forward, available_bytes(self.adapter.device)
        if needed > available:
            warnings.warn(
                f"a transformer call with {batch.largest_forward} rows needs about {bytes_in_words(needed)} of "
                f"activations and {bytes_in_words(available)} are available: set rows_per_forward to at most "
                f"{max(available // per_row, 1)}",
                stacklevel=2,
            )

    def _tell_of_memory(self, knob: str, value: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self._told_of_memory:
            self._told_of_memory = True
            warnings.warn(f"the device ran out of memory: going on with {knob} = {value}", stacklevel=2)
