"""Who waits, who runs, who is done. Plain Python: ids, rows and keys, no tensors.

A *key* stands for everything that keeps requests out of each other's forwards (the latent shape). Both schedulers
keep a queue per key and serve the queue whose head has waited longest, so no key starves.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable


class StepScheduler:
    """Step-wise admission: whenever a place is free, the request that has waited longest joins.

    Args:
        max_num_seqs: requests in flight at once.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self._waiting: OrderedDict[Hashable, OrderedDict[str, int]] = OrderedDict()
        self._key_of: dict[str, Hashable] = {}
        self._running: dict[str, None] = {}
        self._arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._key_of) - len(self._running)

    @property
    def running(self) -> list[str]:
        """Ids of the requests in flight, in order of admission."""
        return list(self._running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._key_of)

    def add(self, request_id: str, key: Hashable = None) -> None:
        """Put a request at the end of its key's queue.

        Raises:
            ValueError: when the id is already in flight.
        """
        if request_id in self._key_of:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        self._waiting.setdefault(key, OrderedDict())[request_id] = self._arrivals
        self._key_of[request_id] = key
        self._arrivals += 1

    def schedule(self) -> list[str]:
        """Admit what may start now and return its ids."""
        admitted = []
        while self._waiting and len(self._running) < self.max_num_seqs:
            admitted.append(self._admit(self._oldest_key()))
        return admitted

    def wait_seconds(self) -> float:
        """How long admission waits for more arrivals before it starts something."""
        return 0.0

    def finish(self, request_id: str) -> None:
        """Take a running or waiting request out: it ended, however it ended.

        Raises:
            KeyError: when no such request is here.
        """
        key = self._key_of.pop(request_id)
        if request_id in self._running:
            del self._running[request_id]
        else:
            del self._waiting[key][request_id]
            self._drop_if_empty(key)

    def check_integrity(self) -> None:
        """Raise an ``AssertionError`` when the books do not agree. For tests."""
        waiting = [name for queue in self._waiting.values() for name in queue]
        assert all(self._waiting.values()), "an empty queue was kept"
        assert len(set(waiting)) == len(waiting), "an id waits twice"
        assert not set(waiting) & set(self._running), "an id waits and runs"
        assert set(waiting) | set(self._running) == set(self._key_of), "an id is lost"
        assert len(self._running) <= self.max_num_seqs, "more run than may"
        for queue in self._waiting.values():
            assert list(queue.values()) == sorted(queue.values()), "a queue is out of order"

    def _oldest_key(self) -> Hashable:
        return min(self._waiting, key=lambda key: next(iter(self._waiting[key].values())))

    def _admit(self, key: Hashable) -> str:
        request_id, _ = self._waiting[key].popitem(last=False)
        self._running[request_id] = None
        self._drop_if_empty(key)
        return request_id

    def _drop_if_empty(self, key: Hashable) -> None:
        if not self._waiting[key]:
            del self._waiting[key]


class RequestScheduler(StepScheduler):
    """Request-level admission: a wave of requests of one key starts when nothing runs, and none joins until it ends.

    Args:
        max_num_seqs: requests in a wave; 1 is serial execution.
        max_wait_ms: how long the first schedule of a wave may wait for more arrivals, in milliseconds. It ends early
            when the queue fills a wave, or when arrivals have been quiet for a fifth of it (20 ms at least, since
            arrivals of one burst are not closer than threads wake up, and 50 ms at most).
        clock: returns seconds.
    """

    def __init__(self, max_num_seqs: int, max_wait_ms: float = 0, clock: Callable[[], float] = time.monotonic):
        super().__init__(max_num_seqs)
        self._max_wait = max_wait_ms / 1000
        self._quiet = min(max(self._max_wait / 5, 0.02), 0.05)
        self._clock = clock
        self._first_arrival: float | None = None
        self._last_arrival = 0.0

    def add(self, request_id: str, key: Hashable = None) -> None:
        super().add(request_id, key)
        self._last_arrival = self._clock()
        if self._first_arrival is None:
            self._first_arrival = self._last_arrival

    def schedule(self) -> list[str]:
        if self._running or not self._waiting or self.wait_seconds() > 0:
            return []
        key = self._oldest_key()
        size = min(self.max_num_seqs, len(self._waiting[key]))
        wave = [self._admit(key) for _ in range(size)]
        self._first_arrival = self._clock() if self._waiting else None
        return wave

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        if not self._waiting:
            # Whoever comes next waits for others anew.
            self._first_arrival = None

    def wait_seconds(self) -> float:
        """How long the wave should still wait for arrivals; 0 when it may start."""
        if self.max_num_seqs == 1 or self._first_arrival is None:
            return 0.0
        if any(len(queue) >= self.max_num_seqs for queue in self._waiting.values()):
            return 0.0
        now = self._clock()
        return max(min(self._first_arrival + self._max_wait, self._last_arrival + self._quiet) - now, 0.0)
