"""What the capacities and the admission wait do: time against rows of a call, requests at a time, and milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.bench.floor import synchronize
from omnibatch.config import RolloutConfig
from omnibatch.engine import RolloutEngine
from omnibatch.request import OmniDiffusionRequest
from omnibatch.step_batch import StepBatch
from omnibatch.step_state import StepRequestState

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def sweep_rows(
    adapter: RolloutAdapter, request: OmniDiffusionRequest, rows: Iterable[int] = ROWS, repeats: int = 5
) -> pd.DataFrame:
    """Time one denoising step for growing numbers of rows, until the device has no memory for more.

    Args:
        adapter: what runs.
        request: of which all rows are copies with other seeds.
        rows: rows of a step; a guided request's negative rows come on top.
        repeats: timed steps, after one that is not.

    Returns:
        A line a number of rows: median milliseconds of a step and of a row.
    """
    lines = []
    for count in rows:
        sampling = replace(request.sampling_params, num_outputs_per_prompt=count)
        state = StepRequestState(OmniDiffusionRequest(request.prompt, sampling))
        try:
            seconds = _time_steps(adapter, state, repeats)
        except torch.OutOfMemoryError:
            break
        lines.append({"rows": count, "ms a step": seconds * 1000, "ms a row": seconds * 1000 / count})
    return pd.DataFrame(lines)


def sweep_configs(
    adapter: RolloutAdapter,
    make_requests: Callable[[int], Sequence[OmniDiffusionRequest]],
    configs: dict[str, RolloutConfig],
    repeats: int = 3,
) -> pd.DataFrame:
    """Run the same requests with each configuration, in turn, after a round that does not count.

    Args:
        adapter: what runs.
        make_requests: gives a round's requests.
        configs: by the names they get in the table.
        repeats: counted rounds.

    Returns:
        A line a configuration: its median gen time, and the median ratio of it to the first configuration's, round by
        round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for round_index in range(repeats + 1):
        for name, config in configs.items():
            requests = make_requests(round_index)
            synchronize(adapter.device)
            started = time.perf_counter()
            RolloutEngine(adapter, config).generate(requests)
            synchronize(adapter.device)
            if round_index:
                seconds[name].append(time.perf_counter() - started)
    first = next(iter(seconds.values()))
    lines: list[dict[str, Any]] = [
        {
            "configuration": name,
            "gen time (s)": statistics.median(times),
            "ratio to the first": statistics.median(own / reference for own, reference in zip(times, first)),
        }
        for name, times in seconds.items()
    ]
    return pd.DataFrame(lines)


@torch.no_grad()
def _time_steps(adapter: RolloutAdapter, state: StepRequestState, repeats: int) -> float:
    adapter.prepare_encode(state)
    batch = StepBatch([state])
    batch.gather()
    seconds = []
    for _ in range(repeats + 1):
        synchronize(adapter.device)
        started = time.perf_counter()
        adapter.denoise_step(batch)
        synchronize(adapter.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
