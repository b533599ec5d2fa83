"""What the step scheduler costs per request and step: ``python -m omnibatch.bench.scheduler_cost``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import pandas as pd

from omnibatch.scheduler import StepScheduler

IN_FLIGHT, STEPS, TICKS, SHAPES = 64, 10, 2000, 3


def cost_per_step(num_waiting: int) -> float:
    """Microseconds per request-step of the loop that a step-wise engine runs, with no model.

    Every tick admits what may start, advances each running request by one step and takes out what is done; new
    requests arrive as fast as old ones leave, so the queue stays as long as it was.

    Args:
        num_waiting: requests in the queue.
    """
    scheduler = StepScheduler(IN_FLIGHT)
    for index in range(num_waiting + IN_FLIGHT):
        scheduler.add(str(index), key=index % SHAPES)
    arrivals = num_waiting + IN_FLIGHT
    steps_done: dict[str, int] = {}
    request_steps = 0
    started = time.perf_counter()
    for _ in range(TICKS):
        for request_id in scheduler.schedule():
            steps_done[request_id] = 0
        for request_id in scheduler.running:
            request_steps += 1
            steps_done[request_id] += 1
            if steps_done[request_id] == STEPS:
                del steps_done[request_id]
                scheduler.finish(request_id)
                scheduler.add(str(arrivals), key=arrivals % SHAPES)
                arrivals += 1
    return (time.perf_counter() - started) / request_steps * 1e6


def measure(queue_lengths: Sequence[int] = (1_000, 10_000, 100_000), repeats: int = 5) -> pd.DataFrame:
    """Time the queue lengths in turn; a row each, with the median of the rounds and the median of the ratios."""
    rounds = [[cost_per_step(length) for length in queue_lengths] for _ in range(repeats)]
    return pd.DataFrame(
        {
            "waiting": list(queue_lengths),
            "us per request-step": [round(statistics.median(column), 2) for column in zip(*rounds)],
            "ratio to the shortest": [
                round(statistics.median(cost / shortest for cost, shortest in zip(column, next(zip(*rounds)))), 2)
                for column in zip(*rounds)
            ],
        }
    )


if __name__ == "__main__":
    print(measure().to_string(index=False))
