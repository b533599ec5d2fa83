"""Measure the modes and capacities on a user's own requests, and pick."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.dispatch import choose_mode, supported_modes
from omnibatch.engine import RolloutEngine
from omnibatch.memory import largest_that_fits
from omnibatch.request import OmniDiffusionRequest

CAPACITIES = (4, 8, 16, 32)

# Of a device's memory, for what allocators lose to fragments.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class MeasuredConfig:
    """One configuration and what it took: median seconds, and on a CUDA device the peak memory in bytes."""

    config: RolloutConfig
    seconds: float
    images_per_second: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Measurement:
    """All configurations that were measured, and the one to take.

    Attributes:
        measured: a configuration each.
        config: the fastest of the chosen mode.
        reason: why that mode, in words.
        cached: whether it was measured earlier and read from the cache.
    """

    measured: list[MeasuredConfig]
    config: RolloutConfig
    reason: str
    cached: bool = field(default=False, compare=False)

    def table(self) -> pd.DataFrame:
        """A row a configuration, the chosen one marked."""
        rows = []
        for entry in self.measured:
            row: dict[str, Any] = {
                "mode": entry.config.mode.value,
                "max_num_seqs": entry.config.max_num_seqs,
                "rows_per_forward": entry.config.rows_per_forward or "all",
                "gen time (s)": round(entry.seconds, 3),
                "images/s": round(entry.images_per_second, 2),
            }
            if entry.peak_bytes is not None:
                row["peak memory (GiB)"] = round(entry.peak_bytes / 2**30, 2)
            rows.append(row | {"choice": "<--" if entry.config == self.config else ""})
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return self.table().to_html(index=False)


def measure(
    adapter: Any,
    requests: Sequence[OmniDiffusionRequest],
    *,
    capacities: Sequence[int] = CAPACITIES,
    repeats: int = 3,
    cache: str | Path | None = None,
    progress: bool = False,
) -> Measurement:
    """Run the requests in every supported mode and for several capacities, in turn, and pick the fastest.

    A capacity of c runs c requests at a time with ``rows_per_forward`` fixed to the rows they have, as it would be
    proposed. The first round is a warm-up and does not count. On a CUDA device, capacities that would not fit by the
    memory of smaller ones are left out.

    Args:
        adapter: what runs the model.
        requests: a small sample of what will be run; a few times the largest capacity tells most.
        capacities: requests at a time; those beyond the number of requests are left out, and with
            none left all requests at a time are tried.
        repeats: counted rounds, of which the median is taken.
        cache: a JSON file. What it holds for this model, device, data type, latent shape and kind of workload is
            returned instead of measuring; what is measured is added.
        progress: show a bar.

    Raises:
        ValueError: when there are no requests, or when the cache is no such file or its folder is missing.
    """
    if not requests:
        raise ValueError("requests must hold at least one request")
    key = _cache_key(adapter, requests, capacities)
    known = {} if cache is None else _read_cache(Path(cache))
    if key in known:
        return _from_json(known[key])
    rows_per_request = max(request.sampling_params.num_outputs_per_prompt for request in requests)
    candidates = [RolloutConfig()]
    fitting = [capacity for capacity in capacities if capacity <= len(requests)] or [len(requests)]
    for capacity in sorted(fitting):
        for mode in supported_modes(adapter):
            if mode is not ExecutionMode.SERIAL:
                rows = capacity * rows_per_request
                candidates.append(RolloutConfig.for_mode(mode, capacity, rows_per_forward=rows))
    measured = _time_in_turn(adapter, requests, candidates, repeats, progress)
    fastest: dict[ExecutionMode, MeasuredConfig] = {}
    for entry in measured:
        mode = entry.config.mode
        if mode not in fastest or entry.seconds < fastest[mode].seconds:
            fastest[mode] = entry
    choice = choose_mode(adapter, {mode: entry.seconds for mode, entry in fastest.items()})
    config = fastest[choice.mode].config if choice.mode in fastest else candidates[0]
    result = Measurement(measured, config, choice.reason)
    if cache is not None:
        Path(cache).write_text(json.dumps(known | {key: asdict(result)}, indent=1))
    return result


def _time_in_turn(
    adapter: Any,
    requests: Sequence[OmniDiffusionRequest],
    candidates: list[RolloutConfig],
    repeats: int,
    progress: bool,
) -> list[MeasuredConfig]:
    seconds: dict[RolloutConfig, list[float]] = {}
    peaks: dict[RolloutConfig, int | None] = {}
    num_images = sum(request.sampling_params.num_outputs_per_prompt for request in requests)
    with tqdm(
        total=len(candidates) * (repeats + 1), desc="measuring", unit="run", disable=not progress, leave=False
    ) as bar:
        for round_index in range(repeats + 1):
            for config in candidates if round_index == 0 else list(seconds):
                bar.update()
                if round_index == 0 and not _should_fit(adapter, config, peaks):
                    continue
                elapsed, peak, fitted = _run(adapter, requests, config)
                if round_index == 0:
                    if fitted:
                        seconds[config], peaks[config] = [], peak
                else:
                    seconds[config].append(elapsed)
    medians = {config: statistics.median(times) for config, times in seconds.items()}
    return [MeasuredConfig(config, median, num_images / median, peaks[config]) for config, median in medians.items()]


def _run(
    adapter: Any, requests: Sequence[OmniDiffusionRequest], config: RolloutConfig
) -> tuple[float, int | None, bool]:
    """Seconds, peak memory on a CUDA device, and whether it fitted without shrinking its calls."""
    on_cuda = adapter.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(adapter.device)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the device ran out of memory")
        outputs = RolloutEngine(adapter, config).generate(requests)
    elapsed = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(adapter.device) if on_cuda else None
    fitted = config.rows_per_forward is None or all(o.rows_per_forward >= config.rows_per_forward for o in outputs)
    return elapsed, peak, fitted


def _should_fit(adapter: Any, config: RolloutConfig, peaks: dict[RolloutConfig, int | None]) -> bool:
    known = {
        other.rows_per_forward: peak
        for other, peak in peaks.items()
        if other.mode is config.mode and other.rows_per_forward is not None and peak is not None
    }
    if len(known) < 2 or config.rows_per_forward is None:
        return True
    limit = int(torch.cuda.get_device_properties(adapter.device).total_memory * USABLE_SHARE)
    return config.rows_per_forward <= largest_that_fits(known, limit)


def _cache_key(adapter: Any, requests: Sequence[OmniDiffusionRequest], capacities: Sequence[int]) -> str:
    model = getattr(getattr(adapter, "pipeline", None), "name_or_path", None) or type(adapter).__name__
    device = torch.cuda.get_device_name(adapter.device) if adapter.device.type == "cuda" else adapter.device.type
    sampling = requests[0].sampling_params
    workload = (
        f"{len(requests)} requests x {sampling.num_outputs_per_prompt}, {sampling.num_inference_steps} steps, "
        f"guidance {sampling.guidance_scale}, {sampling.true_cfg_scale}, capacities {list(capacities)}"
    )
    return " | ".join([str(model), device, str(adapter.dtype), str(adapter.shape_key(requests[0])), workload])


def _read_cache(path: Path) -> dict[str, Any]:
    if not path.exists():
        if not path.parent.is_dir():
            raise ValueError(f"cache: the folder of {path} does not exist")
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cache: {path} cannot be read as JSON: {error}") from error
    if not isinstance(known, dict):
        raise ValueError(f"cache: {path} must hold a JSON object, got {type(known).__name__}")
    return known


def _from_json(content: dict[str, Any]) -> Measurement:
    measured = [MeasuredConfig(**entry | {"config": RolloutConfig(**entry["config"])}) for entry in content["measured"]]
    return Measurement(measured, RolloutConfig(**content["config"]), content["reason"], cached=True)
