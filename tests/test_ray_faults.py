"""A replica goes, its requests do not; and other faults that a pool must live through."""

import asyncio
import os
import signal
import threading
import time
import warnings
from random import Random

import fake_adapter
import pytest
import ray
import torch
from fake_ray_adapters import FaultyAdapter, FaultyModel, LoadingAdapter, OnlyHereAdapter
from peft import LoraConfig, get_peft_model_state_dict
from ray_helpers import CONFIG, assert_same, fake_requests, mixed_requests, replica_pids

import omnibatch as ob
from omnibatch.ray import RolloutPool
from omnibatch.ray.replica import Replica, StaleWeights
from omnibatch.ray.transfer import to_bytes, unpack_output
from omnibatch.ray.weights import WeightsUpdate

pytestmark = pytest.mark.usefixtures("local_ray")

FOUR = ob.RolloutConfig(step_execution=True, max_num_seqs=4, rows_per_forward=4)
WEIGHT = {"weight": torch.zeros(2, 2)}


@pytest.fixture
def faulty(tmp_path):
    marks = str(tmp_path)
    with RolloutPool(
        lambda: FaultyAdapter(marks),
        config=FOUR,
        num_replicas=2,
        health_check_timeout_s=3,
    ) as pool:
        yield pool


@pytest.fixture
def expected():
    def run(count):
        return ob.RolloutEngine(fake_adapter.FakeAdapter(), FOUR).generate(fake_requests(["fine"] * count))

    return run


def test_what_brings_its_replica_down_fails_alone(faulty, expected):
    outputs = faulty.generate(fake_requests(["fine"] * 10 + ["crash"] + ["fine"] * 10), return_errors=True)
    error = outputs.pop(10).error
    assert str(error) == "request '10' brought its replica down each time it ran"
    reference = expected(21)
    del reference[10]
    assert_same(outputs, reference)


@pytest.mark.parametrize("fault", ["crash once", "hang once", "break_device once", "leave once"])
def test_what_goes_wrong_once_is_run_again(faulty, expected, fault):
    prompts = ["fine"] * 5 + [fault] + ["fine"] * 6
    assert_same(faulty.generate(fake_requests(prompts)), expected(12))


def test_a_process_that_is_stopped_is_replaced(faulty, expected):
    faulty.generate(fake_requests(["fine"] * 4))
    os.kill(replica_pids(faulty)[-1], signal.SIGSTOP)
    assert_same(faulty.generate(fake_requests(["fine"] * 20)), expected(20))


def test_an_error_that_cannot_be_sent_comes_in_words(faulty):
    (output,) = faulty.generate(fake_requests(["fail"]), return_errors=True)
    assert str(output.error).startswith("UnsendableError: ('an error with a lock', ")
    assert type(output.error) is RuntimeError


@pytest.mark.parametrize("fault", ["stop", "fail"])
def test_an_odd_error_is_its_request_s_alone(faulty, expected, fault):
    failed, *outputs = faulty.generate(fake_requests([fault] + ["fine"] * 3), return_errors=True)
    words = {"stop": "StopIteration: ", "fail": "UnsendableError: "}
    assert words[fault] in str(failed.error)
    # What shares a forward with an error fails with it, as in one engine.
    assert all(output.error is None or words[fault] in str(output.error) for output in outputs)


@pytest.mark.parametrize(
    "request_",
    [
        ob.OmniDiffusionRequest("x", ob.OmniDiffusionSamplingParams, "bad"),
        ob.OmniDiffusionRequest(5, ob.OmniDiffusionSamplingParams(seed=1), "bad"),
        ob.OmniDiffusionRequest("x", ob.OmniDiffusionSamplingParams(seed=1), ""),
    ],
    ids=["sampling parameters without parentheses", "a number as prompt", "no id"],
)
def test_a_malformed_request_harms_nobody(faulty, expected, request_):
    failed, *outputs = faulty.generate([request_, *fake_requests(["fine"] * 5)], return_errors=True)
    assert isinstance(failed.error, ValueError)
    assert_same(outputs, expected(5))


def test_an_output_that_nobody_can_read_fails_alone():
    with RolloutPool(OnlyHereAdapter) as pool:
        unread, read = pool.generate(fake_requests(["only here", "fine"]), return_errors=True)
        assert str(unread.error) == "the output cannot be read here: this class is not known here"
        assert read.error is None
        # One call each: the replica is not to blame, and nothing was run again.
        assert next(pool._coordinator._sendings) == 2


def test_a_model_whose_process_dies_is_given_up():
    with pytest.raises(RuntimeError, match="its process died each time while the model was made"):
        RolloutPool(lambda: os._exit(1), config=FOUR)


def test_a_replica_that_cannot_be_made_again_leaves_the_others_their_work(tmp_path, expected):
    marks = str(tmp_path)
    with RolloutPool(lambda: FaultyModel(marks, most=3), config=FOUR, num_replicas=2) as pool:
        first, second = replica_pids(pool)
        os.kill(second, signal.SIGKILL)
        assert_same(pool.generate(fake_requests(["fine"] * 12)), expected(12))
        os.kill(first, signal.SIGKILL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="replica-. is given up: ValueError: no more models")
            outputs = pool.generate(fake_requests(["fine"] * 12))
            while len(pool._coordinator._replicas) > 1:
                time.sleep(0.1)
        assert_same(outputs, expected(12))


class TestWeights:
    def test_an_update_that_is_refused_changes_nothing(self):
        with RolloutPool(FaultyAdapter.anywhere, config=FOUR) as pool:
            with pytest.raises(AttributeError, match="transformer"):
                pool.update_weights(WEIGHT)
            assert pool.weights_version == 0
            assert len(pool.generate(fake_requests(["fine"] * 4))) == 4

    def test_of_several_updates_those_before_the_refused_one_hold(self):
        replica = ray.remote(num_cpus=1)(Replica).remote(lambda: LoadingAdapter(0), FOUR)
        (request,) = fake_requests(["fine"])

        def update(version, weights):
            sent = ray.put({name: to_bytes(tensor) for name, tensor in weights.items()})
            return WeightsUpdate(version, [sent], frozenset(weights), None, "default")

        with pytest.raises(ValueError, match="'nonsense', which the transformer lacks"):
            ray.get(replica.prepare.remote([update(1, WEIGHT), update(2, {"nonsense": torch.zeros(1)})]))
        assert unpack_output(ray.get(replica.generate.remote(request, 1))).weights_version == 1
        with pytest.raises(StaleWeights, match="weights of version 1 are loaded, 2 was asked for"):
            ray.get(replica.generate.remote(request, 2))
        ray.get(replica.prepare.remote([update(1, WEIGHT), update(2, WEIGHT)]))
        assert unpack_output(ray.get(replica.generate.remote(request, 2))).weights_version == 2
        ray.kill(replica)

    def test_an_update_waits_for_a_replica_that_can_say_whether_it_fits(self, tmp_path):
        with RolloutPool(lambda: LoadingAdapter(2), config=FOUR) as pool:
            (pid,) = replica_pids(pool)
            os.kill(pid, signal.SIGKILL)
            while pool.num_replicas:
                time.sleep(0.01)
            with pytest.raises(ValueError, match="'nonsense', which the transformer lacks"):
                pool.update_weights({"nonsense": torch.zeros(1)})
            assert len(pool.generate(fake_requests(["fine"] * 4))) == 4

    def test_a_replica_that_joins_after_an_update_has_it(self, tmp_path):
        with RolloutPool(lambda: LoadingAdapter(1), config=FOUR, num_replicas=2) as pool:
            os.kill(replica_pids(pool)[0], signal.SIGKILL)
            while pool.num_replicas == 2:
                time.sleep(0.01)
            pool.update_weights(WEIGHT)
            while pool.num_replicas < 2:
                time.sleep(0.01)
            outputs = pool.generate(fake_requests(["fine"] * 32))
            assert {output.weights_version for output in outputs} == {1}

    def test_two_updates_at_once(self):
        with RolloutPool(lambda: LoadingAdapter(0), config=FOUR) as pool:
            (request,) = fake_requests(["fine"], steps=100_000)
            running = threading.Thread(target=lambda: pool.generate([request], return_errors=True))
            running.start()
            time.sleep(0.2)
            updating = threading.Thread(target=lambda: pool.update_weights(WEIGHT))
            updating.start()
            time.sleep(0.2)
            with pytest.raises(RuntimeError, match="being updated already"):
                pool.update_weights(WEIGHT)
            assert pool.abort(request.request_id)
            updating.join()
            running.join()
            assert pool.weights_version == 1

    def test_a_new_replica_gets_adapters_and_weights_in_their_order(self, engine_like_replicas):
        config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"])
        transformer = engine_like_replicas.adapter.transformer
        with RolloutPool("tiny-sd35", config=CONFIG) as pool:
            transformer.add_adapter(config)
            pool.update_weights(get_peft_model_state_dict(transformer), lora_config=config)
            with torch.no_grad():
                for weight in transformer.parameters():
                    weight.mul_(1.02)
            base = {name: weight for name, weight in transformer.state_dict().items() if "lora_" not in name}
            pool.update_weights(base)
            pool.update_weights(get_peft_model_state_dict(transformer), lora_config=config)
            requests = mixed_requests()
            expected = engine_like_replicas.generate(requests)
            assert_same(pool.generate(requests), expected)
            (pid,) = replica_pids(pool)
            os.kill(pid, signal.SIGKILL)
            outputs = pool.generate(requests)
            assert_same(outputs, expected)
            assert {output.weights_version for output in outputs} == {3}
            config = LoraConfig(r=2, lora_alpha=40, init_lora_weights=False, target_modules=["to_q", "to_v"])
            with pytest.raises(
                ValueError, match=r"lora_config\.lora_alpha must be 4, as 'default' was made with, got 40"
            ):
                pool.update_weights(get_peft_model_state_dict(transformer), lora_config=config)


class TestClosing:
    def test_during_an_update(self):
        pool = RolloutPool(lambda: LoadingAdapter(0), config=FOUR)
        errors = []

        def update():
            try:
                pool.update_weights(WEIGHT)
            except RuntimeError as error:
                errors.append(str(error))

        running = threading.Thread(
            target=lambda: pool.generate(fake_requests(["fine"], steps=100_000), return_errors=True)
        )
        updating = threading.Thread(target=update)
        running.start()
        time.sleep(0.3)
        updating.start()
        time.sleep(0.3)
        pool.close()
        for thread in (running, updating):
            thread.join(20)
            assert not thread.is_alive()
        assert errors == ["the pool is closed"]

    def test_while_a_replica_is_started_again(self):
        pool = RolloutPool(lambda: LoadingAdapter(1), config=FOUR)
        (pid,) = replica_pids(pool)
        os.kill(pid, signal.SIGKILL)
        while pool.num_replicas:
            time.sleep(0.01)
        pool.close()
        deadline = time.monotonic() + 20
        while replica_pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert replica_pids() == []


def test_tasks_that_are_cancelled_at_once_harm_nobody(faulty, expected):
    async def main():
        for round_index in range(50):
            (request,) = fake_requests(["fine"])
            request.request_id = str(round_index)
            task = asyncio.create_task(faulty.generate_async(request))
            for _ in range(round_index % 4):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert_same(faulty.generate(fake_requests(["fine"] * 8)), expected(8))
    assert not faulty._coordinator._pending


@pytest.mark.filterwarnings("ignore:replica-0 is given up")
def test_a_ray_that_was_shut_down_ends_the_requests():
    pool = RolloutPool(lambda: LoadingAdapter(0), config=FOUR, health_check_timeout_s=2)
    outputs = []
    running = threading.Thread(
        target=lambda: outputs.extend(pool.generate(fake_requests(["fine"], steps=100_000), return_errors=True))
    )
    running.start()
    time.sleep(0.5)
    ray.shutdown()
    running.join(30)
    assert "Ray was shut down in this process" in str(outputs[0].error)
    assert not ray.is_initialized()
    pool.close()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)


def test_twenty_runs_with_replicas_killed_at_random(engine_like_replicas):
    random = Random(0)
    runs_that_lost_some, sent = 0, 0
    with RolloutPool("tiny-sd35", config=CONFIG, num_replicas=3) as pool:
        for run in range(20):
            requests = mixed_requests(seed=run)
            while not (pids := replica_pids(pool)):
                time.sleep(0.1)
            killing = threading.Timer(random.uniform(0, 0.02), os.kill, (random.choice(pids), signal.SIGKILL))
            # By outputs and not by the clock, so that work is left for it to lose on any machine.
            kill_after = random.randrange(1, len(requests) // 2)
            outputs = []
            for output in pool.stream(requests):
                outputs.append(output)
                if len(outputs) == kill_after:
                    killing.start()
            killing.join()
            assert len(outputs) == len(requests)
            assert_same(
                sorted(outputs, key=lambda output: int(output.request_id)), engine_like_replicas.generate(requests)
            )
            sent, sent_before = next(pool._coordinator._sendings) + 1, sent
            runs_that_lost_some += sent - sent_before > len(requests) + 1
    # Some kills hit a replica that had just ended its share; most must not, or nothing was tried.
    assert runs_that_lost_some >= 10
