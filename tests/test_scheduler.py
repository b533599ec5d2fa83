"""Admission: who may start, in which order, after which wait."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibatch.scheduler import RequestScheduler, StepScheduler


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_step_scheduler_fills_free_places_in_order():
    scheduler = StepScheduler(max_num_seqs=2)
    for name in "abcd":
        scheduler.add(name)
    assert scheduler.schedule() == ["a", "b"]
    assert scheduler.schedule() == []
    scheduler.finish("a")
    assert scheduler.schedule() == ["c"]
    assert scheduler.running == ["b", "c"]


def test_request_scheduler_starts_a_wave_when_the_last_has_ended():
    scheduler = RequestScheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(name)
    assert scheduler.schedule() == ["a", "b"]
    scheduler.finish("a")
    assert scheduler.schedule() == []
    scheduler.finish("b")
    assert scheduler.schedule() == ["c"]


def test_a_wave_has_one_key_and_the_oldest_goes_first():
    scheduler = RequestScheduler(max_num_seqs=4)
    for name, key in [("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 1)]:
        scheduler.add(name, key)
    assert scheduler.schedule() == ["a", "c", "e"]
    for name in ("a", "c", "e"):
        scheduler.finish(name)
    assert scheduler.schedule() == ["b", "d"]


def test_an_id_in_flight_is_refused_and_usable_again_after():
    scheduler = StepScheduler(max_num_seqs=1)
    scheduler.add("a")
    with pytest.raises(ValueError, match="'a' is already in flight"):
        scheduler.add("a")
    scheduler.schedule()
    with pytest.raises(ValueError, match="'a' is already in flight"):
        scheduler.add("a")
    scheduler.finish("a")
    scheduler.add("a")
    assert scheduler.schedule() == ["a"]


def test_a_thousand_requests_of_five_shapes_make_few_waves_and_none_starves():
    random, capacity, keys = Random(0), 16, 5
    key_of = {str(index): random.randrange(keys) for index in range(1000)}
    scheduler = RequestScheduler(capacity)
    for name, key in key_of.items():
        scheduler.add(name, key)
    waves = []
    while scheduler.has_unfinished:
        waves.append(scheduler.schedule())
        assert len({key_of[name] for name in waves[-1]}) == 1
        for name in waves[-1]:
            scheduler.finish(name)
        scheduler.check_integrity()
    best = sum(math.ceil(list(key_of.values()).count(key) / capacity) for key in range(keys))
    assert len(waves) <= 1.1 * best
    for wave_index, wave in enumerate(waves):
        for name in wave:
            # Only waves led by an older request go first: those that the older ones fill, and one more a shape.
            assert wave_index <= int(name) / capacity + keys


class TestAdmissionWait:
    def scheduler(self, max_num_seqs=4, wait=50):
        self.clock = Clock()
        return RequestScheduler(max_num_seqs, wait, clock=self.clock)

    def test_no_wait_by_default(self):
        scheduler = self.scheduler(wait=0)
        scheduler.add("a")
        assert scheduler.schedule() == ["a"]

    def test_an_arrival_within_the_quiet_window_joins(self):
        scheduler = self.scheduler()
        scheduler.add("a")
        assert scheduler.schedule() == []
        self.clock.now = 0.010
        assert scheduler.schedule() == []
        # Threads wake up late: well behind the tenth millisecond is still in time.
        self.clock.now = 0.019
        scheduler.add("b")
        assert scheduler.schedule() == []
        self.clock.now = 0.0391
        assert scheduler.schedule() == ["a", "b"]

    def test_a_full_wave_starts_at_once(self):
        scheduler = self.scheduler(max_num_seqs=2)
        scheduler.add("a")
        scheduler.add("b")
        assert scheduler.schedule() == ["a", "b"]

    def test_steady_arrivals_cannot_postpone_it(self):
        scheduler = self.scheduler(max_num_seqs=100)
        for index in range(12):
            self.clock.now = index * 0.005
            scheduler.add(str(index))
            if scheduler.schedule():
                break
        assert self.clock.now == pytest.approx(0.05)

    @pytest.mark.parametrize(("wait", "quiet"), [(10, 10), (50, 20), (150, 30), (1000, 50)])
    def test_a_lone_request_waits_until_it_is_quiet(self, wait, quiet):
        scheduler = self.scheduler(wait=wait)
        scheduler.add("a")
        assert scheduler.wait_seconds() == pytest.approx(quiet / 1000)

    def test_an_aborted_arrival_does_not_shorten_the_next_ones_wait(self):
        scheduler = self.scheduler()
        scheduler.add("a")
        scheduler.finish("a")
        self.clock.now = 0.1
        scheduler.add("b")
        assert scheduler.wait_seconds() == pytest.approx(0.02)

    def test_serial_never_waits(self):
        scheduler = self.scheduler(max_num_seqs=1)
        scheduler.add("a")
        assert scheduler.schedule() == ["a"]


@given(
    kind=st.sampled_from([StepScheduler, RequestScheduler]),
    capacity=st.integers(1, 4),
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "schedule", "finish", "abort"]), st.integers(0, 3)), max_size=80
    ),
)
def test_every_id_ends_once_whatever_happens(kind, capacity, actions):
    scheduler = kind(capacity)
    added, ended = 0, []
    for action, choice in actions:
        if action == "add":
            scheduler.add(str(added), key=choice % 2)
            added += 1
        elif action == "schedule":
            scheduler.schedule()
        elif action == "finish" and scheduler.running:
            ended.append(scheduler.running[choice % len(scheduler.running)])
            scheduler.finish(ended[-1])
        elif action == "abort" and scheduler.num_waiting:
            waiting = [str(i) for i in range(added) if str(i) not in ended and str(i) not in scheduler.running]
            ended.append(waiting[choice % len(waiting)])
            scheduler.finish(ended[-1])
        scheduler.check_integrity()
    while scheduler.has_unfinished:
        scheduler.schedule()
        for name in scheduler.running:
            scheduler.finish(name)
            ended.append(name)
        scheduler.check_integrity()
    assert sorted(ended, key=int) == [str(i) for i in range(added)]
