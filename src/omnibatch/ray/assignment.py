"""Which request goes to which replica, and which are under suspicion when one dies. Plain Python: ids and names.

A request never runs twice at a time. Whatever was on a replica that died runs again: at first wherever there is room,
after another death with fewer and fewer others beside it, so that one that brings its replica down each time is found
alone in the end, and fails alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# A request is not blamed for a death before its third, since two may be bad luck.
FEWEST_DEATHS = 3
# With each death after its first, a request gets this many times fewer others beside it.
FEWER_EACH_TIME = 8


class Assignment:
    """Hands out waiting requests: to the replica with the least work (then the one that took least so far), and a
    group's to the same one.

    A replica goes on with the group it took from last, else takes one that nobody serves, and only when there is none
    helps with another's: so a group's prompt is encoded once, and no replica idles while requests wait.

    Args:
        capacity: requests that a replica holds at most.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._waiting: dict[Hashable, OrderedDict[str, None]] = {}
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._on: dict[str, OrderedDict[str, None]] = {}
        self._load: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._serves: dict[str, Hashable] = {}
        self._group: dict[str, Hashable] = {}
        self._work: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._replica_of: dict[str, str] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._replica_of)

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas that take requests."""
        return list(self._on)

    def on(self, replica: str) -> list[str]:
        """Ids of the requests that a replica holds."""
        return list(self._on.get(replica, ()))

    def add(self, request_id: str, group: Hashable = None, work: int = 1) -> None:
        """Let a request wait.

        Args:
            request_id: not in flight.
            group: equal for requests that one replica should serve.
            work: what it costs beside others.

        Raises:
            ValueError: when the id is already in flight.
        """
        if request_id in self._group:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        self._group[request_id], self._work[request_id], self._deaths[request_id] = group, work, 0
        self._waiting.setdefault(group, OrderedDict())[request_id] = None

    def add_replica(self, replica: str) -> None:
        """Let a replica take requests; it holds none."""
        self._on[replica], self._load[replica] = OrderedDict(), 0
        # As much as the one that took least, so that a newcomer does not get everything for a while.
        self._taken[replica] = min((self._taken[other] for other in self._on if other != replica), default=0)

    def next(self) -> tuple[str, str] | None:
        """Assign one request and return its id and its replica; ``None`` when there is nothing to assign now."""
        replicas = sorted(self._on, key=lambda name: (self._load[name], self._taken[name]))
        if self._lost:
            lost = next(iter(self._lost))
            for replica in replicas:
                if len(self._on[replica]) < min(map(self._company, [lost, *self._on[replica]])):
                    del self._lost[lost]
                    return self._assign(lost, replica)
            # The replica that is closest to having room for it takes nothing else until it has.
            replicas = replicas[1:]
        for replica in replicas:
            is_free = all(self._company(request_id) == self.capacity for request_id in self._on[replica])
            if self._waiting and is_free and len(self._on[replica]) < self.capacity:
                return self._assign(self._take(replica), replica)
        return None

    def finish(self, request_id: str) -> None:
        """Forget a request, wherever it is: it ended, or nobody wants it any more."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            del self._on[replica][request_id]
            self._load[replica] -= self._work[request_id]
        elif request_id in self._lost:
            del self._lost[request_id]
        else:
            self._stop_waiting(request_id)
        del self._group[request_id], self._work[request_id], self._deaths[request_id]

    def lose_replica(self, replica: str) -> list[str]:
        """Take a replica out; what was on it waits to run again.

        Returns:
            Ids that are to fail, and are forgotten: alone on the replica, not for the first time.
        """
        held = self._on.pop(replica)
        del self._load[replica], self._taken[replica]
        self._serves.pop(replica, None)
        failed = []
        for request_id in held:
            del self._replica_of[request_id]
            self._deaths[request_id] += 1
            self._lost[request_id] = None
            if len(held) == 1 and self._deaths[request_id] >= FEWEST_DEATHS:
                self.finish(request_id)
                failed.append(request_id)
        return failed

    def check_integrity(self) -> None:
        """Raise an ``AssertionError`` unless every id is in exactly one place and no replica holds too many."""
        waiting = [request_id for group in self._waiting.values() for request_id in group]
        held = [request_id for ids in self._on.values() for request_id in ids]
        everywhere = [*waiting, *self._lost, *held]
        assert sorted(everywhere) == sorted(self._group)
        assert set(held) == set(self._replica_of)
        assert all(self._waiting.values()), "a group without requests"
        assert all(self._deaths[request_id] == 0 for request_id in waiting)
        for replica, ids in self._on.items():
            assert self._load[replica] == sum(self._work[request_id] for request_id in ids)
            assert len(ids) <= min(map(self._company, ids), default=0), "too many beside one that is under suspicion"

    def _company(self, request_id: str) -> int:
        """How many requests may be on a replica with this one, itself included."""
        return max(1, self.capacity // FEWER_EACH_TIME ** max(0, self._deaths[request_id] - 1))

    def _take(self, replica: str) -> str:
        group = self._serves.get(replica)
        if replica not in self._serves or group not in self._waiting:
            served = set(self._serves.values())
            unserved = next((group for group in self._waiting if group not in served), None)
            longest = max(self._waiting, key=lambda group: len(self._waiting[group]))
            group = self._serves[replica] = longest if unserved is None else unserved
        request_id = next(iter(self._waiting[group]))
        self._stop_waiting(request_id)
        return request_id

    def _stop_waiting(self, request_id: str) -> None:
        group = self._group[request_id]
        del self._waiting[group][request_id]
        if not self._waiting[group]:
            del self._waiting[group]

    def _assign(self, request_id: str, replica: str) -> tuple[str, str]:
        self._on[replica][request_id] = None
        self._load[replica] += self._work[request_id]
        self._taken[replica] += self._work[request_id]
        self._replica_of[request_id] = replica
        return request_id, replica
