"""Rollouts on replicas: the same results as one engine, through every way of asking for them."""

import asyncio
import os
import signal
import threading
from collections import Counter

import pytest
import ray
import torch
from fake_ray_adapters import PidAdapter
from peft import LoraConfig, get_peft_model_state_dict
from ray_helpers import CONFIG, assert_same, fake_requests, mixed_requests, replica_pids, resident_bytes
from safetensors.torch import load_file

import omnibatch as ob
from omnibatch.cli import main
from omnibatch.ray import RolloutPool, coordinator
from omnibatch.ray.replica import Replica
from omnibatch.request import RequestAborted
from omnibatch.tiny import EXAMPLE_PROMPTS

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def pool(local_ray):
    with RolloutPool("tiny-sd35", config=CONFIG, num_replicas=2) as pool:
        yield pool


def test_results_are_those_of_one_engine(pool, engine_like_replicas):
    requests = mixed_requests()
    assert_same(pool.generate(requests), engine_like_replicas.generate(requests))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_whatever_the_number_of_replicas(engine_like_replicas, num_replicas):
    with RolloutPool("tiny-sd35", config=CONFIG, num_replicas=num_replicas) as pool:
        assert pool.num_replicas == num_replicas
        requests = mixed_requests(seed=7)
        assert_same(pool.generate(requests), engine_like_replicas.generate(requests))


def test_a_stream_gives_every_output_once(pool):
    requests = mixed_requests()
    outputs = list(pool.stream(requests))
    assert sorted(int(output.request_id) for output in outputs) == list(range(len(requests)))
    assert [output.sampling_params for output in outputs] == [
        requests[int(output.request_id)].sampling_params for output in outputs
    ]


def test_a_closed_stream_aborts_the_rest(pool):
    stream = pool.stream(mixed_requests())
    next(stream)
    stream.close()
    # The ids are free again, and nothing of before comes back.
    assert len(pool.generate(mixed_requests())) == 12


def test_outputs_may_be_written_to(pool):
    output, other = pool.generate(mixed_requests()[:2])
    before = other.latents.clone()
    output.latents.zero_()
    assert torch.equal(other.latents, before)


def test_many_tasks_await_their_own_request(pool, engine_like_replicas):
    requests = mixed_requests(seed=2)

    async def main():
        return await asyncio.gather(*[pool.generate_async(request) for request in requests])

    assert_same(asyncio.run(main()), engine_like_replicas.generate(requests))


def test_a_cancelled_task_aborts_its_request(pool):
    (long,) = fake_requests(["a sign"], steps=1000)

    async def main():
        task = asyncio.create_task(pool.generate_async(long))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not pool.abort(long.request_id)


def test_an_aborted_request_ends_and_the_others_go_on(pool):
    long, short = fake_requests(["a sign", "another sign"], steps=5000)
    short.sampling_params.num_inference_steps = 4
    threading.Timer(0.5, lambda: pool.abort(long.request_id)).start()
    ended, finished = pool.generate([long, short], return_errors=True)
    assert isinstance(ended.error, RequestAborted)
    assert finished.error is None
    assert not pool.abort(long.request_id)


def test_a_bad_request_fails_alone(pool):
    requests = mixed_requests()[:4]
    requests[1].sampling_params.num_inference_steps = -1
    requests[2].request_id = requests[0].request_id
    outputs = pool.generate([*requests, "no request"], return_errors=True)
    assert [str(output.error) if output.error else None for output in outputs] == [
        None,
        "num_inference_steps must be a positive integer, got -1",
        "request_id '0' is already in flight",
        None,
        "a request must be an OmniDiffusionRequest, got str",
    ]
    with pytest.raises(ob.RolloutError, match="num_inference_steps"):
        pool.generate(requests[1:2])


def test_what_cannot_be_sent_fails_alone(pool):
    requests = mixed_requests()[:2]
    requests[0].sampling_params.extra_args = {"lock": threading.Lock()}
    failed, finished = pool.generate(requests, return_errors=True)
    assert str(failed.error) == "the request or its output cannot be sent: cannot pickle '_thread.lock' object"
    assert finished.error is None


def test_without_a_seed_a_request_gets_one_that_stays_its_own(pool, engine_like_replicas):
    requests = mixed_requests()[:2]
    for request in requests:
        request.sampling_params.seed = None
    outputs = pool.generate(requests)
    assert outputs[0].seeds != outputs[1].seeds
    assert requests[0].sampling_params.seed is None
    for request, output in zip(requests, outputs):
        request.sampling_params.seed = output.seeds[0]
    assert_same(outputs, engine_like_replicas.generate(requests))


def test_new_weights_reach_every_replica_and_every_later_one(engine_like_replicas):
    trainer = engine_like_replicas.adapter.transformer
    requests = mixed_requests(seed=3)
    with RolloutPool("tiny-sd35", config=CONFIG, num_replicas=2) as pool:
        assert {output.weights_version for output in pool.generate(requests)} == {0}
        with torch.no_grad():
            for weight in trainer.parameters():
                weight.mul_(1.01)
        assert pool.update_weights(trainer.state_dict()) == 1
        # What the trainer does to its own weights afterwards is no business of the replicas.
        sent = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        with torch.no_grad():
            for weight in trainer.parameters():
                weight.zero_()
        trainer.load_state_dict(sent)
        expected = engine_like_replicas.generate(requests)
        assert_same(pool.generate(requests), expected)
        with pytest.raises(ValueError, match=r"^state_dict holds 'nonsense', which the transformer lacks"):
            pool.update_weights({"nonsense": torch.zeros(1)})
        assert pool.weights_version == 1
        os.kill(replica_pids(pool)[-1], signal.SIGKILL)
        outputs = pool.generate(requests)
        assert_same(outputs, expected)
        while pool.num_replicas < 2:
            outputs = pool.generate(requests)
        os.kill(replica_pids(pool)[0], signal.SIGKILL)
        outputs += pool.generate(requests)
        assert {output.weights_version for output in outputs} == {1}
        assert_same(outputs[-len(requests) :], expected)


def test_a_lora_is_sent_alone(engine_like_replicas):
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"])
    requests = mixed_requests(seed=4)
    with RolloutPool("tiny-sd35", config=CONFIG, num_replicas=2) as pool:
        plain = pool.generate(requests)
        engine_like_replicas.adapter.transformer.add_adapter(config)
        pool.update_weights(get_peft_model_state_dict(engine_like_replicas.adapter.transformer), lora_config=config)
        outputs = pool.generate(requests)
        assert_same(outputs, engine_like_replicas.generate(requests))
        assert not torch.equal(outputs[0].latents, plain[0].latents)


def test_no_rollout_mixes_weights(pool):
    requests = mixed_requests(seed=5, images=8)
    stream = pool.stream(requests)
    outputs = [next(stream)]
    before = pool.weights_version
    transformer = ob.load("tiny-sd35", device="cpu", dtype=torch.float32).transformer
    versions = []
    updating = threading.Thread(target=lambda: versions.append(pool.update_weights(transformer.state_dict())))
    updating.start()
    outputs += list(stream)
    updating.join()
    assert versions == [before + 1]
    assert len(outputs) == len(requests)
    assert {output.weights_version for output in outputs} <= {before, before + 1}


def test_a_model_that_cannot_be_made_says_why():
    with pytest.raises(RuntimeError, match="a replica could not be made: ValueError: model 'nonsense' is neither"):
        RolloutPool("nonsense")
    with pytest.raises(ValueError, match="num_replicas must be a positive integer, got 0"):
        RolloutPool("tiny-sd35", num_replicas=0)
    for seconds in (0, -1, float("nan"), "60"):
        with pytest.raises(ValueError, match=f"health_check_timeout_s must be a positive number, got {seconds!r}"):
            RolloutPool("tiny-sd35", health_check_timeout_s=seconds)
    with pytest.raises(ValueError, match="config must be a RolloutConfig, got dict"):
        RolloutPool("tiny-sd35", config={"max_num_seqs": 4})
    with pytest.raises(ValueError, match="model must be a name, a folder, a hub id or a function"):
        RolloutPool(None)


def test_what_can_be_no_weights_is_named(pool):
    version, weight = pool.weights_version, torch.zeros(1)
    for arguments, named in (
        ({"state_dict": torch.nn.Linear(1, 1)}, "state_dict must hold tensors by name"),
        ({"state_dict": {}}, "state_dict must hold tensors by name"),
        ({"state_dict": {"a": 1}}, r"state_dict\['a'\] must be a tensor, got int"),
        ({"state_dict": {"a": weight}, "lora_config": {"r": 4}}, "lora_config must be a peft.LoraConfig, got dict"),
        ({"state_dict": {"a.lora_A.weight": weight}}, "lacks; a LoRA's weights need its lora_config beside them"),
    ):
        with pytest.raises(ValueError, match=named):
            pool.update_weights(**arguments)
    assert pool.weights_version == version


def test_a_pool_that_finds_no_place_says_so(local_ray, monkeypatch):
    monkeypatch.setattr(coordinator, "GRACE_SECONDS", 0.5)

    def make_actor():
        return ray.remote(num_gpus=1)(Replica).remote(PidAdapter, CONFIG)

    async def main():
        waiting = coordinator.Coordinator(make_actor, 1, 1, 60.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting.start(), 3)
        waiting.close()
        await waiting.stop()

    with pytest.warns(UserWarning, match=r"no replica is up yet: .* what ray_actor_options ask .it has"):
        asyncio.run(main())


def test_a_closed_pool_ends_what_is_in_flight_and_takes_no_more():
    pool = RolloutPool(PidAdapter, config=CONFIG)
    stream = pool.stream(fake_requests(["a"], steps=100_000))
    outputs = []
    reading = threading.Thread(target=lambda: outputs.extend(stream))
    reading.start()
    while not pool._coordinator._pending:
        pass
    pool.close()
    reading.join()
    assert "closed" in str(outputs[0].error)
    for use in (lambda: pool.generate(fake_requests(["b"])), lambda: pool.abort("0")):
        with pytest.raises(RuntimeError, match="the pool is closed"):
            use()
    pool.close()


def test_a_progress_bar_counts_requests(pool, capsys):
    pool.generate(mixed_requests(), progress=True)
    assert "request" in capsys.readouterr().err


def test_the_command_runs_on_replicas(engine_like_replicas, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(EXAMPLE_PROMPTS[:3]))
    arguments = ["rollout", "--model", "tiny-sd35", "--prompts", str(prompts), "--images-per-prompt", "2", "--quiet"]
    arguments += ["--max-sequence-length", "48", "--rows-per-forward", "4", "--steps", "3"]
    for name, more in (("here", []), ("replicas", ["--replicas", "2"])):
        assert main([*arguments, "--out", str(tmp_path / name), *more]) == 0
    here, replicas = (load_file(tmp_path / name / "rollouts.safetensors") for name in ("here", "replicas"))
    assert here.keys() == replicas.keys()
    assert all(torch.equal(here[name], replicas[name]) for name in here)
    assert "6 images in mode step (2 replicas)" in capsys.readouterr().out
    nowhere = [*arguments[:2], "nonsense", *arguments[3:], "--out", str(tmp_path / "nowhere"), "--replicas", "2"]
    assert main(nowhere) == 2
    assert "omnibatch: error: a replica could not be made: ValueError: model 'nonsense'" in capsys.readouterr().err


def test_thousands_of_requests_are_balanced_and_leave_nothing_behind():
    config = ob.RolloutConfig(step_execution=True, max_num_seqs=32)
    with RolloutPool(PidAdapter, config=config, num_replicas=4) as pool:
        counts, sizes = Counter(), []
        requests = fake_requests([f"prompt {place // 16}" for place in range(5000)])
        for place, output in enumerate(pool.stream(requests)):
            assert output.error is None
            counts[int.from_bytes(bytes(output.output.flatten().tolist()), "little")] += 1
            if place in (1000, 4999):
                sizes.append(resident_bytes(pool))
        assert set(counts) == set(replica_pids(pool))
        assert sum(counts.values()) == 5000
        assert max(counts.values()) <= 1.1 * 1250
        assert min(counts.values()) >= 0.9 * 1250
        grown = [after - before for before, after in zip(*sizes)]
        assert max(grown) < 40 * 2**20
        assert not pool._coordinator._pending
