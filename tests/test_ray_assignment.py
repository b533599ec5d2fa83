"""Which replica takes which request, without Ray."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibatch.ray.assignment import FEWEST_DEATHS, Assignment


def assignment_of(capacity=8, replicas=("a", "b"), groups=()):
    assignment = Assignment(capacity)
    for replica in replicas:
        assignment.add_replica(replica)
    for group, count in groups:
        for index in range(count):
            assignment.add(f"{group}{index}", group)
    return assignment


def hand_out(assignment):
    pairs = []
    while (pair := assignment.next()) is not None:
        pairs.append(pair)
        assignment.check_integrity()
    return pairs


def test_a_group_goes_to_one_replica():
    pairs = hand_out(assignment_of(capacity=100, groups=[("g", 16), ("h", 16), ("i", 16), ("j", 16)]))
    served = {group: {replica for request_id, replica in pairs if request_id[0] == group} for group in "ghij"}
    assert [len(replicas) for replicas in served.values()] == [1, 1, 1, 1]
    assert sorted(replica for _, replica in pairs) == ["a"] * 32 + ["b"] * 32


def test_the_last_group_is_shared_rather_than_leaving_a_replica_idle():
    assignment = assignment_of(capacity=100, replicas="abcd", groups=[("g", 16), ("h", 16)])
    hand_out(assignment)
    assert [len(assignment.on(replica)) for replica in "abcd"] == [8, 8, 8, 8]


def test_work_counts_and_not_requests():
    assignment = assignment_of(capacity=100)
    assignment.add("long", "g", work=30)
    for index in range(30):
        assignment.add(str(index), index, work=1)
    hand_out(assignment)
    assert "long" in assignment.on("a")
    assert len(assignment.on("a")) in (1, 2)


def test_who_is_done_first_takes_more():
    assignment = assignment_of(capacity=1, groups=[(group, 1) for group in "ghij"])
    assert hand_out(assignment) == [("g0", "a"), ("h0", "b")]
    for request_id in ("h0", "i0"):
        assignment.finish(request_id)
        hand_out(assignment)
    assert assignment.on("b") == ["j0"]


def test_no_replica_holds_more_than_it_may():
    assignment = assignment_of(capacity=3, groups=[("g", 20)])
    assert len(hand_out(assignment)) == 6


def test_an_id_in_flight_is_refused():
    assignment = assignment_of(groups=[("g", 1)])
    with pytest.raises(ValueError, match="'g0' is already in flight"):
        assignment.add("g0")
    hand_out(assignment)
    with pytest.raises(ValueError, match="'g0' is already in flight"):
        assignment.add("g0")
    assignment.finish("g0")
    assignment.add("g0")


def run_with(poison, assignment, others):
    """Let everything end; what shares a replica with the poison goes down with it. Who finished, who failed, deaths."""
    finished, failed, deaths = [], [], 0
    while len(finished) + len(failed) < others + 1:
        hand_out(assignment)
        for replica in assignment.replicas:
            held = assignment.on(replica)
            if poison in held:
                deaths += 1
                failed += assignment.lose_replica(replica)
                assignment.add_replica(replica)
            else:
                for request_id in held:
                    assignment.finish(request_id)
                finished += held
            assignment.check_integrity()
    return finished, failed, deaths


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 64, 512])
@pytest.mark.parametrize("replicas", ["a", "abc"])
def test_what_brings_its_replica_down_fails_alone_and_soon(capacity, replicas):
    assignment = assignment_of(capacity, replicas, [("g", 700)])
    finished, failed, deaths = run_with("g300", assignment, 699)
    assert failed == ["g300"]
    assert sorted(finished) == sorted(f"g{index}" for index in range(700) if index != 300)
    assert FEWEST_DEATHS <= deaths <= 6


def test_a_replica_that_dies_under_a_request_twice_is_bad_luck():
    assignment = assignment_of(capacity=1, replicas="a", groups=[("g", 1)])
    for _ in range(FEWEST_DEATHS - 1):
        hand_out(assignment)
        assert assignment.lose_replica("a") == []
        assignment.add_replica("a")
    assert hand_out(assignment) == [("g0", "a")]
    assert assignment.lose_replica("a") == ["g0"]
    assignment.check_integrity()


def test_after_one_death_the_others_take_over_at_once():
    assignment = assignment_of(capacity=8, groups=[("g", 8), ("h", 80)])
    hand_out(assignment)
    lost = assignment.on("a")
    assignment.lose_replica("a")
    for request_id in assignment.on("b")[:5]:
        assignment.finish(request_id)
    assert hand_out(assignment) == [(request_id, "b") for request_id in lost[:5]]


def test_others_go_on_while_some_are_under_suspicion():
    assignment = assignment_of(capacity=16, groups=[("g", 8), ("h", 80)])
    hand_out(assignment)
    suspects = assignment.on("a")
    for _ in range(2):
        assignment.lose_replica("a")
        assignment.add_replica("a")
        hand_out(assignment)
    # Two of those that have seen two deaths run beside each other, and beside nobody else.
    assert set(assignment.on("a")) < set(suspects)
    assert len(assignment.on("a")) == 2
    assert len(assignment.on("b")) == 16
    assignment.finish(assignment.on("b")[0])
    hand_out(assignment)
    assert len(assignment.on("b")) == 16


@given(
    capacity=st.integers(1, 20),
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "next", "finish", "lose", "return"]), st.integers(0, 5)), max_size=120
    ),
)
def test_every_request_is_in_one_place_whatever_happens(capacity, actions):
    assignment = assignment_of(capacity, replicas="abc")
    added, ended = 0, []
    for action, choice in actions:
        up, down = assignment.replicas, [name for name in "abc" if name not in assignment.replicas]
        open_ids = [str(index) for index in range(added) if str(index) not in ended]
        if action == "add":
            assignment.add(str(added), choice % 3, work=choice)
            added += 1
        elif action == "next":
            assignment.next()
        elif action == "finish" and open_ids:
            ended.append(open_ids[choice % len(open_ids)])
            assignment.finish(ended[-1])
        elif action == "lose" and up:
            ended += assignment.lose_replica(up[choice % len(up)])
        elif action == "return" and down:
            assignment.add_replica(down[0])
        assignment.check_integrity()
    for name in "abc":
        if name not in assignment.replicas:
            assignment.add_replica(name)
    while len(ended) < added:
        hand_out(assignment)
        held = [request_id for name in "abc" for request_id in assignment.on(name)]
        # Whatever happened before, nothing waits for ever.
        assert held
        for request_id in held:
            assignment.finish(request_id)
        ended += held
    assert sorted(ended, key=int) == [str(index) for index in range(added)]
