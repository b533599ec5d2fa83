"""The same requests in every mode that an adapter supports, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from tqdm import tqdm

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.dispatch import supported_modes
from omnibatch.engine import RolloutEngine
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest


@dataclass
class Comparison:
    """Measured modes.

    Attributes:
        seconds: wall-clock seconds of each counted round, per mode.
        outputs: what the last round of each mode gave.
        num_images: pictures per round.
    """

    seconds: dict[ExecutionMode, list[float]]
    outputs: dict[ExecutionMode, list[DiffusionOutput]]
    num_images: int

    def table(self) -> pd.DataFrame:
        """A row a mode: median seconds, pictures a second, speed-up over serial (median of the rounds' ratios), and
        the largest difference of any trajectory latent from serial."""
        serial = ExecutionMode.SERIAL
        rows = []
        for mode, times in self.seconds.items():
            ratios = [reference / own for reference, own in zip(self.seconds[serial], times)]
            median = statistics.median(times)
            rows.append(
                {
                    "mode": mode.value,
                    "gen time (s)": round(median, 3),
                    "images/s": round(self.num_images / median, 2),
                    "speed-up": round(statistics.median(ratios), 2),
                    "difference": largest_difference(self.outputs[mode], self.outputs[serial]),
                }
            )
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return self.table().to_html(index=False, formatters={"difference": "{:.1e}".format})


def compare(
    adapter: RolloutAdapter,
    make_requests: Callable[[], Sequence[OmniDiffusionRequest]],
    *,
    max_num_seqs: int,
    rows_per_forward: int | None = None,
    repeats: int = 3,
    progress: bool = False,
) -> Comparison:
    """Run the same requests in every supported mode, in turn, after one uncounted round of each.

    Args:
        make_requests: gives the requests anew for each round.
        max_num_seqs: capacity of the batching modes.
        rows_per_forward: as in :class:`~omnibatch.RolloutConfig`.
        repeats: counted rounds.
    """
    modes = supported_modes(adapter)[::-1]
    seconds: dict[ExecutionMode, list[float]] = {mode: [] for mode in modes}
    outputs: dict[ExecutionMode, list[DiffusionOutput]] = {}
    rounds = [(round_index, mode) for round_index in range(repeats + 1) for mode in modes]
    for round_index, mode in tqdm(rounds, desc="comparing modes", unit="run", disable=not progress, leave=False):
        config = RolloutConfig.for_mode(mode, max_num_seqs, rows_per_forward=rows_per_forward)
        engine, requests = RolloutEngine(adapter, config), make_requests()
        started = time.perf_counter()
        outputs[mode] = engine.generate(requests)
        if round_index:
            seconds[mode].append(time.perf_counter() - started)
    num_images = sum(len(output.seeds) for output in outputs[ExecutionMode.SERIAL])
    return Comparison(seconds, outputs, num_images)


def largest_difference(outputs: Sequence[DiffusionOutput], reference: Sequence[DiffusionOutput]) -> float:
    """The largest absolute difference between two runs' trajectory latents."""
    largest = 0.0
    for output, expected in zip(outputs, reference, strict=True):
        if output.trajectory_latents is not None and expected.trajectory_latents is not None:
            difference = (output.trajectory_latents - expected.trajectory_latents).abs().max()
            largest = max(largest, float(difference))
    return largest
