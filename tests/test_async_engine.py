"""Many tasks, one engine."""

import asyncio
import threading

import pytest
import torch
from fake_adapter import FakeAdapter

import omnibatch as ob
from omnibatch.request import RequestAborted

STEP = ob.RolloutConfig(step_execution=True, max_num_seqs=4)


def request(name, prompt="a", **sampling):
    arguments = {"num_inference_steps": 4, "seed": 1} | sampling
    return ob.OmniDiffusionRequest(prompt, ob.OmniDiffusionSamplingParams(**arguments), name)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def asynchronous(adapter=None, config=STEP):
    return ob.AsyncRolloutEngine(ob.RolloutEngine(adapter or FakeAdapter(), config))


def test_many_tasks_share_the_engine():
    requests = [request(str(index), seed=index, num_inference_steps=2 + index % 5) for index in range(20)]
    expected = ob.RolloutEngine(FakeAdapter()).generate(requests)

    async def main():
        async with asynchronous() as engine:
            return await asyncio.gather(*[engine.generate(each) for each in requests])

    for output, other in zip(run(main()), expected):
        assert output.request_id == other.request_id
        assert torch.equal(output.trajectory_latents, other.trajectory_latents)


def test_a_fault_is_raised_where_it_is_awaited():
    async def main():
        async with asynchronous() as engine:
            return await asyncio.gather(
                engine.generate(request("good")), engine.generate(request("bad", "bad")), return_exceptions=True
            )

    good, bad = run(main())
    assert good.error is None
    assert isinstance(bad, ValueError)


def test_an_id_in_flight_is_refused():
    async def main():
        async with asynchronous() as engine:
            return await asyncio.gather(
                engine.generate(request("same")), engine.generate(request("same")), return_exceptions=True
            )

    first, second = run(main())
    assert first.error is None
    assert "already in flight" in str(second)


class SlowAdapter(FakeAdapter):
    """Waits in every step until it is let go."""

    def __init__(self):
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.seen = set()

    def denoise_step(self, input_batch):
        self.seen |= {state.request_id for state in input_batch.states}
        self.entered.set()
        self.go_on.wait(timeout=30)
        return super().denoise_step(input_batch)


def test_cancelling_a_task_aborts_its_request():
    adapter = SlowAdapter()

    async def main():
        async with asynchronous(adapter, ob.RolloutConfig(step_execution=True, max_num_seqs=1)) as engine:
            running = asyncio.create_task(engine.generate(request("running", num_inference_steps=500)))
            await asyncio.to_thread(adapter.entered.wait)
            waiting = asyncio.create_task(engine.generate(request("waiting")))
            await asyncio.sleep(0.01)
            waiting.cancel()
            running.cancel()
            cancelled = await asyncio.gather(running, waiting, return_exceptions=True)
            adapter.go_on.set()
            return cancelled, await engine.generate(request("next"))

    cancelled, output = run(main())
    assert [type(each) for each in cancelled] == [asyncio.CancelledError] * 2
    assert output.error is None
    assert adapter.seen == {"running", "next"}


def test_closing_ends_what_is_in_flight_and_refuses_more():
    adapter = SlowAdapter()

    async def main():
        engine = asynchronous(adapter)
        task = asyncio.create_task(engine.generate(request("running", num_inference_steps=500)))
        await asyncio.to_thread(adapter.entered.wait)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        adapter.go_on.set()
        await closing
        with pytest.raises(RequestAborted, match="closed before request 'running' ended"):
            await task
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.generate(request("late"))
        engine.close()

    run(main())


def test_weights_change_between_trajectories():
    class Weighted(FakeAdapter):
        weight, steps = 1.0, 0

        def denoise_step(self, input_batch):
            self.steps += 1
            return super().denoise_step(input_batch) * self.weight

    adapter = Weighted()

    async def main():
        async with asynchronous(adapter) as engine:
            before = [asyncio.create_task(engine.generate(request(str(i), num_inference_steps=20))) for i in range(3)]
            while adapter.steps < 2:
                await asyncio.sleep(0)
            async with engine.update_weights():
                assert all([await task for task in before])
                adapter.weight = 2.0
                after = asyncio.create_task(engine.generate(request("after")))
                await asyncio.sleep(0.01)
                assert not after.done()
            return [await task for task in before], await after

    before, after = run(main())
    assert [output.weights_version for output in before] == [0, 0, 0]
    assert after.weights_version == 1
    (expected,) = ob.RolloutEngine(adapter).generate([request("after")])
    assert torch.equal(after.latents, expected.latents)


def test_arrivals_during_the_admission_wait_join_the_wave():
    class Recorder(FakeAdapter):
        sizes = ()

        def denoise_step(self, input_batch):
            self.sizes = (*self.sizes, len(input_batch.states))
            return super().denoise_step(input_batch)

    adapter = Recorder()
    config = ob.RolloutConfig(max_num_seqs=8, request_batch_max_wait_ms=1000)

    async def main():
        async with asynchronous(adapter, config) as engine:

            async def later(name):
                await asyncio.sleep(0.01)
                return await engine.generate(request(name))

            return await asyncio.gather(engine.generate(request("first")), later("second"))

    run(main())
    assert adapter.sizes == (2, 2, 2, 2)


def test_nobody_waits_for_a_thread_that_is_gone(monkeypatch):
    engine = ob.RolloutEngine(FakeAdapter(), STEP)
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)

    async def main():
        rollouts = ob.AsyncRolloutEngine(engine)
        with pytest.raises(ZeroDivisionError):
            await rollouts.generate(request("a"))
        with pytest.raises(RuntimeError, match="closed") as caught:
            await rollouts.generate(request("b"))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(main())
