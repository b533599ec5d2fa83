"""What replicas bring, and what Ray costs: ``python -m omnibatch.bench.scale_out``.

The same requests run in this process, on one replica and on two, in turn, each with one thread; a round's ratios are
taken within the round.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import pandas as pd
import ray
import torch
from tqdm import tqdm

from omnibatch import OmniDiffusionRequest, OmniDiffusionSamplingParams, RolloutConfig, RolloutEngine, load, tiny
from omnibatch.prompt_files import make_requests
from omnibatch.ray import RolloutPool

CONFIG = RolloutConfig(step_execution=True, max_num_seqs=16, rows_per_forward=16)


def measure_scale_out(model: str, num_requests: int = 128, steps: int = 10, repeats: int = 5) -> dict[str, object]:
    """Time an engine and pools of one and of two replicas in turn, after one uncounted round.

    Args:
        model: an embedded one.
        num_requests: of a round.
        steps: denoising steps.
        repeats: counted rounds.

    Returns:
        The engine's median seconds, medians of the ratios, and the milliseconds that a request costs more on one
        replica than in this process.
    """
    sampling = OmniDiffusionSamplingParams(num_inference_steps=steps, guidance_scale=1.0, max_sequence_length=32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = RolloutEngine(load(model, device="cpu", dtype=torch.float32), CONFIG)
    seconds: dict[str, list[float]] = {"engine": [], "one replica": [], "two replicas": []}
    with RolloutPool(model, config=CONFIG) as one, RolloutPool(model, config=CONFIG, num_replicas=2) as two:
        runs: dict[str, Callable[[Sequence[OmniDiffusionRequest]], object]] = {
            "engine": engine.generate,
            "one replica": one.generate,
            "two replicas": two.generate,
        }
        for round_index in tqdm(range(repeats + 1), desc=model, unit="round", leave=False):
            requests = make_requests(
                tiny.EXAMPLE_PROMPTS[:8], sampling, images_per_prompt=num_requests // 8, seed=1000 * round_index
            )
            for name, run in runs.items():
                started = time.perf_counter()
                run(requests)
                if round_index:
                    seconds[name].append(time.perf_counter() - started)
    torch.set_num_threads(threads)

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[name], seconds[other])), 2)

    extra = statistics.median(a - b for a, b in zip(seconds["one replica"], seconds["engine"]))
    return {
        "model": model,
        "requests": num_requests,
        "engine (s)": round(statistics.median(seconds["engine"]), 3),
        "one replica / engine": ratio("one replica", "engine"),
        "one replica / two": ratio("one replica", "two replicas"),
        "Ray (ms a request)": round(1000 * extra / num_requests, 2),
    }


def main() -> None:
    """Print a row a model."""
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    print(pd.DataFrame([measure_scale_out(name) for name in tiny.MODEL_NAMES]).to_string(index=False))
    ray.shutdown()


if __name__ == "__main__":
    main()
