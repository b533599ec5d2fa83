"""Requests that arrive over time, step-wise against request-level: ``python -m omnibatch.bench.arrivals``."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm

from omnibatch import OmniDiffusionRequest, OmniDiffusionSamplingParams, RolloutConfig, RolloutEngine, load, tiny
from omnibatch.adapters.base import RolloutAdapter

CAPACITY, STEP_COUNTS = 8, (10, 50)


def arriving_requests(count: int, mean_gap: float, seed: int) -> list[tuple[float, OmniDiffusionRequest]]:
    """Requests of 10 or 50 steps with Poisson arrivals.

    Args:
        count: how many.
        mean_gap: seconds between arrivals, on average.
        seed: of gaps, prompts and steps.

    Returns:
        Pairs of arrival time in seconds and request, in order.
    """
    source, now, arrivals = random.Random(seed), 0.0, []
    for index in range(count):
        now += source.expovariate(1 / mean_gap)
        sampling = OmniDiffusionSamplingParams(
            num_inference_steps=source.choice(STEP_COUNTS),
            height=tiny.IMAGE_SIZE,
            width=tiny.IMAGE_SIZE,
            guidance_scale=1.0,
            max_sequence_length=32,
            seed=index,
        )
        prompt = source.choice(tiny.EXAMPLE_PROMPTS)
        arrivals.append((now, OmniDiffusionRequest(prompt, sampling, str(index))))
    return arrivals


def serve(engine: RolloutEngine, arrivals: Sequence[tuple[float, OmniDiffusionRequest]]) -> tuple[list[float], float]:
    """Submit requests as they arrive and run them.

    Returns:
        Each request's seconds from arrival to result, and the seconds from the first arrival to the last result.
    """
    due = {request.request_id: arrival for arrival, request in arrivals}
    waiting, latencies = list(arrivals)[::-1], []
    started = time.perf_counter()
    while waiting or engine.has_unfinished:
        now = time.perf_counter() - started
        while waiting and waiting[-1][0] <= now:
            engine.submit(waiting.pop()[1])
        if not engine.has_unfinished:
            time.sleep(max(waiting[-1][0] - now, 0))
            continue
        ended = engine.step()
        now = time.perf_counter() - started
        latencies += [now - due[output.request_id] for output in ended]
    return latencies, now - arrivals[0][0]


def measure(
    adapter: RolloutAdapter, count: int = 60, load_share: float = 0.7, repeats: int = 3, progress: bool = True
) -> pd.DataFrame:
    """Serve the same arrivals in both modes in turn.

    Args:
        adapter: of an embedded model.
        count: requests per round.
        load_share: arrivals come at this share of the rate at which step-wise works off a full queue.
        repeats: rounds, each with arrivals of its own.
        progress: show a bar.

    Returns:
        A row a mode: the medians over the rounds of median and 95th-percentile latency and of the makespan.
    """
    configs = {
        "step": RolloutConfig(step_execution=True, max_num_seqs=CAPACITY),
        "request": RolloutConfig(max_num_seqs=CAPACITY),
    }
    at_once = [(0.0, request) for _, request in arriving_requests(count, 1.0, seed=0)]
    for config in configs.values():
        serve(RolloutEngine(adapter, config), at_once[:CAPACITY])
    _, busy = serve(RolloutEngine(adapter, configs["step"]), at_once)
    gap = busy / count / load_share
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in configs}
    for seed in tqdm(range(repeats), desc="serving arrivals in both modes", unit="round", disable=not progress):
        arrivals = arriving_requests(count, gap, seed)
        for name, config in configs.items():
            latencies, makespan = serve(RolloutEngine(adapter, config), arrivals)
            tail = statistics.quantiles(latencies, n=20)[-1]
            results[name].append((statistics.median(latencies), tail, makespan))
    rows = []
    for name, rounds in results.items():
        half, tail, makespan = (round(statistics.median(column), 3) for column in zip(*rounds))
        ratio = statistics.median(own[0] / other[0] for own, other in zip(rounds, results["request"]))
        rows.append(
            {
                "mode": name,
                "median latency (s)": half,
                "95 % latency (s)": tail,
                "makespan (s)": makespan,
                "requests/s": round(count / makespan, 2),
                "latency / request-level": round(ratio, 2),
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    """Print a table a model."""
    for name in tiny.MODEL_NAMES:
        print(f"\n{name}, {CAPACITY} in flight, Poisson arrivals, 10 or 50 steps")
        print(measure(load(name, device="cpu", dtype=torch.float32)).to_string(index=False))


if __name__ == "__main__":
    main()
