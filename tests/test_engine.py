"""One expected result, three ways to it; and faults that stay with their request."""

import gc
import tracemalloc
import weakref
from functools import partial
from random import Random

import pytest
import torch
from fake_adapter import FakeAdapter, PackedForward, SingleForward
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

import omnibatch as ob
from omnibatch import tiny
from omnibatch.request import RequestAborted

CONFIGS = {
    "serial": ob.RolloutConfig(),
    "request": ob.RolloutConfig(max_num_seqs=8),
    "request, waves of 2": ob.RolloutConfig(max_num_seqs=2),
    "step": ob.RolloutConfig(step_execution=True, max_num_seqs=8),
    "step, 2 in flight": ob.RolloutConfig(step_execution=True, max_num_seqs=2),
    "step, 3 rows": ob.RolloutConfig(step_execution=True, max_num_seqs=8, rows_per_forward=3),
}


@pytest.fixture
def mixed_requests(make_request):
    """Different prompts, guidance, steps, outputs, noise, windows, samplers and output types."""
    window = {"sde_window_size": 2, "sde_window_range": [0, 4]}
    return lambda: [
        make_request("x", "a", num_inference_steps=4),
        make_request("a long red sign " * 9, "b", "blurry", num_inference_steps=9, guidance_scale=4.0, seed=10),
        make_request('a sign that says "7"', "c", num_outputs_per_prompt=3, seed=20, extra_args=window),
        make_request("y", "d", "ugly", guidance_scale=6.0, true_cfg_scale=6.0, extra_args={"sde_type": "cps"}, seed=30),
        make_request("z", "e", num_inference_steps=9, extra_args={"noise_level": 0.0}, output_type="latent", seed=40),
        make_request("z", "f", extra_args={"logprobs": False, "sde_type": "dance_sde"}, output_type="both", seed=50),
    ]


@pytest.fixture(scope="module")
def serial_results():
    return {}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_mode_gives_the_serial_result(adapter, mixed_requests, assert_same, serial_results, config):
    if adapter not in serial_results:
        engine = ob.RolloutEngine(adapter)
        serial_results[adapter] = [engine.generate([request])[0] for request in mixed_requests()]
    for output, expected in zip(ob.RolloutEngine(adapter, config).generate(mixed_requests()), serial_results[adapter]):
        assert_same(output, expected)


@pytest.fixture(scope="module")
def fixed_row_results():
    return {}


def run_staggered(engine, requests, random):
    """Submit requests at random ticks, in random order."""
    waiting, outputs = random.sample(requests, len(requests)), {}
    while waiting or engine.has_unfinished:
        for _ in range(min(random.randrange(3), len(waiting))):
            engine.submit(waiting.pop())
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[request.request_id] for request in requests]


@pytest.mark.parametrize("name", tiny.MODEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["serial", "request", "step"])
@pytest.mark.parametrize("arrivals", ["shuffled", "staggered"])
def test_fixed_rows_give_the_same_bits_whatever_happens(
    name, dtype, mode, arrivals, mixed_requests, assert_same, fixed_row_results
):
    if (name, dtype) not in fixed_row_results:
        adapter = ob.load(name, device="cpu", dtype=dtype)
        engine = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4))
        fixed_row_results[name, dtype] = adapter, engine.generate(mixed_requests())
    adapter, expected = fixed_row_results[name, dtype]
    config = {
        "serial": ob.RolloutConfig(rows_per_forward=4),
        "request": ob.RolloutConfig(max_num_seqs=4, rows_per_forward=4),
        "step": ob.RolloutConfig(step_execution=True, max_num_seqs=3, rows_per_forward=4),
    }[mode]
    engine, requests, random = ob.RolloutEngine(adapter, config), mixed_requests(), Random(1)
    if arrivals == "staggered":
        outputs = run_staggered(engine, requests, random)
    else:
        order = random.sample(range(len(requests)), len(requests))
        shuffled = engine.generate([requests[index] for index in order])
        outputs = [output for _, output in sorted(zip(order, shuffled), key=lambda pair: pair[0])]
    for output, other in zip(outputs, expected):
        assert_same(output, other, tolerance=0)


def test_an_output_tells_all_there_is_to_know(adapter, make_request):
    request = make_request(
        num_outputs_per_prompt=2,
        seed=7,
        num_inference_steps=6,
        output_type="both",
        extra_args={"sde_window_size": 2, "sde_window_range": [0, 5]},
    )
    (output,) = ob.RolloutEngine(adapter).generate([request])
    latent_shape = adapter.latent_shape(64, 64)
    assert output.output.shape == (2, 3, 64, 64)
    assert output.output.dtype == torch.uint8
    assert output.latents.shape == (2, *latent_shape)
    assert output.trajectory_latents.shape == (2, 3, *latent_shape)
    assert output.trajectory_log_probs.shape == output.trajectory_timesteps.shape == (2, 2)
    assert output.trajectory_latents.dtype == output.trajectory_log_probs.dtype == torch.float32
    start, end = output.sde_window
    assert torch.equal(output.trajectory_timesteps, output.timesteps[start:end].expand(2, 2))
    assert torch.equal(output.timesteps, output.sigmas[:-1] * 1000)
    assert output.sigmas[-1] == 0
    assert output.seeds == [7, 8]
    assert (output.num_steps, output.rows_per_forward) == (6, 2)
    assert set(output.stage_times) == {"queue", "encode", "denoise", "decode"}
    assert output.prompt_embeds.shape[0] == 2
    assert output.negative_prompt_embeds is None


def test_any_one_output_can_be_made_again_alone(adapter, make_request):
    window = {"sde_window_size": 3, "sde_window_range": [0, 3]}
    (together,) = ob.RolloutEngine(adapter).generate(
        [make_request(num_outputs_per_prompt=3, seed=5, extra_args=window)]
    )
    (alone,) = ob.RolloutEngine(adapter).generate([make_request(seed=7, extra_args=window)])
    torch.testing.assert_close(together.trajectory_latents[2:], alone.trajectory_latents, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("step_execution", [False, True])
@pytest.mark.parametrize("window", [(0, 2), (2, 4), (3, 6)])
def test_a_shared_prefix_gives_the_unshared_result(adapter, make_request, rows, step_execution, window):
    sampling = {"num_outputs_per_prompt": 3, "num_inference_steps": 6, "guidance_scale": 3.0, "seed": 5}
    extra_args = {"sde_window_size": window[1] - window[0], "sde_window_range": list(window)}
    start = torch.stack([adapter.draw_latents(64, 64, torch.Generator().manual_seed(5))] * 3)
    config = ob.RolloutConfig(step_execution=step_execution, max_num_seqs=4, rows_per_forward=rows)
    requests = [
        make_request("x", "shared", extra_args=extra_args | {"shared_noise": True}, **sampling),
        make_request("y", "other", num_inference_steps=3),
        make_request("x", "unshared", extra_args=extra_args, latents=start, **sampling),
    ]
    shared, _, unshared = ob.RolloutEngine(adapter, config).generate(requests)
    assert shared.shared_steps == window[0]
    assert unshared.shared_steps == 0
    for name in ("trajectory_latents", "trajectory_log_probs", "latents"):
        ours, theirs = getattr(shared, name), getattr(unshared, name)
        if rows is not None:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert not torch.equal(shared.latents[0], shared.latents[1])


def test_a_shared_prefix_saves_rows(adapter, make_request, monkeypatch):
    rows, predict = [], adapter.predict_velocity
    monkeypatch.setattr(adapter, "predict_velocity", lambda *a: (rows.append(len(a[0])), predict(*a))[1])
    extra_args = {"sde_window_size": 1, "sde_window_range": [2, 3], "shared_noise": True}
    ob.RolloutEngine(adapter).generate([make_request(num_outputs_per_prompt=4, extra_args=extra_args)])
    assert rows == [1, 1, 4, 4]
    rows.clear()
    (ode,) = ob.RolloutEngine(adapter).generate(
        [make_request(num_outputs_per_prompt=4, extra_args={"noise_level": 0.0, "shared_noise": True})]
    )
    assert ode.output.shape[0] == 4


@pytest.mark.parametrize("config", [CONFIGS["request"], CONFIGS["step"]], ids=["request", "step"])
def test_a_bad_request_fails_alone(adapter, make_request, assert_same, config):
    requests = [make_request(request_id=name, seed=index) for index, name in enumerate("abc")]
    expected = ob.RolloutEngine(adapter).generate(requests)
    mixed = [requests[0], make_request(request_id="bad", height=100), requests[1], requests[2]]
    engine = ob.RolloutEngine(adapter, config)
    with pytest.raises(ob.RolloutError, match=r"1 of 4 requests failed\nbad: ValueError: height .* 100") as caught:
        engine.generate(mixed)
    outputs = engine.generate(mixed, return_errors=True)
    for results in (outputs, caught.value.outputs):
        assert isinstance(results[1].error, ValueError)
        for output, other in zip([results[0], *results[2:]], expected):
            assert_same(output, other)
    assert not engine.has_unfinished


def test_a_transformer_that_raises_ends_its_members_once(adapter, make_request, monkeypatch):
    engine = ob.RolloutEngine(adapter, CONFIGS["step"])
    predict, calls = adapter.predict_velocity, []

    def failing(*arguments):
        calls.append(len(calls))
        if len(calls) == 3:
            raise RuntimeError("the third call")
        return predict(*arguments)

    monkeypatch.setattr(adapter, "predict_velocity", failing)
    outputs = engine.generate([make_request(request_id=name) for name in "ab"], return_errors=True)
    assert [str(output.error) for output in outputs] == ["the third call"] * 2
    assert not engine.has_unfinished
    assert engine.generate([make_request()])[0].error is None


def test_ids_in_flight_are_unique(adapter, make_request):
    engine = ob.RolloutEngine(adapter, CONFIGS["step"])
    outputs = engine.generate([make_request(), make_request(seed=1), make_request(request_id="")], return_errors=True)
    assert outputs[0].error is None
    assert "'request' is already in flight" in str(outputs[1].error)
    assert "request_id must be a non-empty string" in str(outputs[2].error)
    with pytest.raises(ValueError, match="request_id"):
        engine.submit(make_request(request_id=""))


def test_submit_step_and_abort(adapter, make_request, assert_same):
    requests = [make_request(request_id=name, seed=index) for index, name in enumerate("abcd")]
    expected = ob.RolloutEngine(adapter).generate(requests)
    engine = ob.RolloutEngine(adapter, ob.RolloutConfig(step_execution=True, max_num_seqs=3))
    for request in requests:
        engine.submit(request)
    ended = engine.step() + engine.step()
    assert ended == []
    assert engine.abort("b")
    assert engine.abort("d")
    assert not engine.abort("b")
    assert not engine.abort("nobody")
    while engine.has_unfinished:
        ended += engine.step()
    results = {output.request_id: output for output in ended}
    assert len(ended) == len(results) == 4
    assert isinstance(results["b"].error, RequestAborted)
    assert isinstance(results["d"].error, RequestAborted)
    for index in (0, 2):
        assert_same(results["abcd"[index]], expected[index])


def test_generate_keeps_what_others_submitted(adapter, make_request):
    engine = ob.RolloutEngine(adapter, CONFIGS["step"])
    engine.submit(make_request(request_id="early"))
    (output,) = engine.generate([make_request(request_id="mine", num_inference_steps=6)])
    assert output.request_id == "mine"
    assert [output.request_id for output in engine.step()] == ["early"]
    assert not engine.has_unfinished


def test_an_interrupted_generate_leaves_nothing_in_flight(adapter, make_request, monkeypatch):
    engine = ob.RolloutEngine(adapter, CONFIGS["step"])
    monkeypatch.setattr(adapter, "denoise_step", lambda batch: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([make_request()])
    assert not engine.has_unfinished


def test_sizes_run_side_by_side(adapter, make_request, assert_same):
    requests = [make_request("x", "small"), make_request("x", "large", height=96, width=80, num_inference_steps=6)]
    expected = [ob.RolloutEngine(adapter).generate([request])[0] for request in requests]
    assert expected[1].output.shape == (1, 3, 96, 80)
    for config in (CONFIGS["request"], CONFIGS["step"]):
        for output, other in zip(ob.RolloutEngine(adapter, config).generate(requests), expected):
            assert_same(output, other)


def test_an_adapter_without_the_mode_is_refused(adapter, monkeypatch):
    monkeypatch.setattr(type(adapter), "post_decode", None)
    with pytest.raises(ValueError, match="lacks post_decode"):
        ob.RolloutEngine(adapter, CONFIGS["step"])


def test_no_requests_give_no_outputs(adapter):
    assert ob.RolloutEngine(adapter).generate([]) == []


def test_the_transformer_keeps_its_gradients(adapter, make_request):
    """Rollouts must not leave inference tensors behind that a training step trips over."""
    (output,) = ob.RolloutEngine(adapter).generate([make_request()])
    weight = torch.ones((), requires_grad=True)
    (output.trajectory_latents * weight).sum().backward()
    assert weight.grad is not None


def fake_request(name, prompt="a", **sampling):
    arguments = {"num_inference_steps": 3, "seed": 1} | sampling
    return ob.OmniDiffusionRequest(prompt, ob.OmniDiffusionSamplingParams(**arguments), name)


def test_stream_yields_as_requests_end():
    requests = [fake_request(str(steps), num_inference_steps=steps) for steps in (5, 2, 4)]
    bad = [fake_request("bad", "bad"), fake_request("5")]
    outputs = list(ob.RolloutEngine(FakeAdapter(), CONFIGS["step"]).stream(requests + bad))
    assert [output.request_id for output in outputs] == ["5", "bad", "2", "4", "5"]
    assert [output.error is None for output in outputs] == [False, False, True, True, True]


def test_leaving_a_stream_early_aborts_the_rest():
    engine = ob.RolloutEngine(FakeAdapter(), CONFIGS["step"])
    stream = engine.stream([fake_request(str(steps), num_inference_steps=steps) for steps in (5, 2, 4)])
    assert next(stream).request_id == "2"
    stream.close()
    assert not engine.has_unfinished


def test_two_streams_share_an_engine():
    engine = ob.RolloutEngine(FakeAdapter(), CONFIGS["step"])
    first = engine.stream([fake_request("a"), fake_request("b", num_inference_steps=6)])
    second = engine.stream([fake_request("c"), fake_request("d", num_inference_steps=6)])
    names = [next(stream).request_id for stream in (first, second, second, first)]
    assert sorted(names) == ["a", "b", "c", "d"]
    assert not engine.has_unfinished


def test_progress_is_told_after_every_step():
    told = []
    requests = [fake_request("a", num_inference_steps=2), fake_request("b", num_inference_steps=3)]
    ob.RolloutEngine(FakeAdapter(), CONFIGS["step"]).generate(requests, on_step=told.append)
    assert [tuple(progress) for progress in told] == [(2, 5, 2, 0), (4, 5, 1, 1), (5, 5, 0, 2)]


def test_the_bar_counts_denoising_steps_and_leaves_nothing_behind(capsys, monkeypatch):
    monkeypatch.setattr("omnibatch.engine.tqdm", partial(tqdm, mininterval=0, miniters=1))
    requests = [fake_request("a", num_inference_steps=2), fake_request("b", num_inference_steps=3)]
    ob.RolloutEngine(FakeAdapter(), CONFIGS["request"]).generate(requests, progress=True)
    shown = capsys.readouterr().err.split("\r")
    assert "5/5" in shown[-3]
    assert shown[-2:] == [" " * len(shown[-2]), ""]


def test_closing_ends_everything_with_an_error():
    with ob.RolloutEngine(FakeAdapter(), ob.RolloutConfig(step_execution=True, max_num_seqs=1)) as engine:
        engine.submit(fake_request("running"))
        engine.submit(fake_request("waiting"))
        engine.step()
        outputs = engine.close()
    assert [output.request_id for output in outputs] == ["running", "waiting"]
    assert all("engine was closed" in str(output.error) for output in outputs)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(fake_request("late"))
    assert engine.close() == []


def test_running_in_a_closed_or_paused_engine_is_an_error_not_a_hang():
    engine = ob.RolloutEngine(FakeAdapter(), CONFIGS["step"])
    with engine.update_weights(), pytest.raises(RuntimeError, match="while the weights are being updated"):
        engine.generate([fake_request("a")])
    assert not engine.scheduler.has_unfinished
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate([fake_request("b")], on_step=lambda progress: engine.close())


@pytest.mark.parametrize("method", ["prepare_encode", "denoise_step", "step_scheduler", "post_decode"])
def test_an_interrupt_anywhere_loses_nothing(method, monkeypatch):
    adapter = FakeAdapter()
    engine = ob.RolloutEngine(adapter, CONFIGS["step"])
    for name in "abc":
        engine.submit(fake_request(name))
    original, calls = getattr(adapter, method), []

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(adapter, method, interrupted)
    outputs = []
    while engine.has_unfinished:
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            engine.scheduler.check_integrity()
    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    assert all(output.error is None for output in outputs)
    expected = ob.RolloutEngine(FakeAdapter()).generate([fake_request(name) for name in "abc"])
    for output, other in zip(sorted(outputs, key=lambda output: output.request_id), expected):
        assert torch.equal(output.latents, other.latents)


def test_an_id_is_taken_until_its_output_is():
    engine = ob.RolloutEngine(FakeAdapter(), CONFIGS["step"])
    engine.submit(fake_request("a"))
    engine.abort("a")
    with pytest.raises(ValueError, match="'a' is already in flight: its output was not taken yet"):
        engine.submit(fake_request("a"))
    engine.step()
    engine.submit(fake_request("a"))


def test_an_aborted_request_frees_its_memory():
    engine = ob.RolloutEngine(FakeAdapter(), CONFIGS["step"])
    engine.submit(fake_request("a"))
    engine.step()
    (state,) = engine._running.values()
    latents = weakref.ref(state.latents)
    del state
    engine.abort("a")
    gc.collect()
    assert latents() is None


class Weighted(FakeAdapter):
    """Its velocity scales with a weight, and it notes which weights each request met."""

    def __init__(self):
        self.weight, self.met, self.forgotten = 1.0, {}, 0

    def denoise_step(self, input_batch):
        for state in input_batch.states:
            self.met.setdefault(state.request_id, set()).add(self.weight)
        return super().denoise_step(input_batch) * self.weight

    def forget_prompts(self):
        self.forgotten += 1


@pytest.mark.parametrize("abort_running", [False, True])
@pytest.mark.parametrize("step_execution", [False, True])
def test_no_trajectory_mixes_weights(abort_running, step_execution):
    adapter = Weighted()
    engine = ob.RolloutEngine(adapter, ob.RolloutConfig(step_execution=step_execution, max_num_seqs=2))
    for index in range(4):
        engine.submit(fake_request(str(index), num_inference_steps=3 + index))
    engine.step()
    with engine.update_weights(abort_running=abort_running):
        adapter.weight = 2.0
        engine.submit(fake_request("meanwhile"))
        early = {output.request_id: output for output in engine.step()}
        with pytest.raises(RuntimeError, match="being updated already"), engine.update_weights():
            pass
    late = {}
    while engine.has_unfinished:
        late |= {output.request_id: output for output in engine.step()}
    assert set(early) == {"0", "1"}
    assert set(late) == {"2", "3", "meanwhile"}
    assert all((output.error is not None) == abort_running for output in early.values())
    assert {output.weights_version for output in early.values()} == {0}
    assert {output.weights_version for output in late.values()} == {1}
    assert adapter.met == {"0": {1.0}, "1": {1.0}, "2": {2.0}, "3": {2.0}, "meanwhile": {2.0}}
    assert adapter.forgotten == 1


def test_a_soak_loses_nothing_and_keeps_nothing():
    """20,000 requests through one engine: every id once, memory flat."""
    engine = ob.RolloutEngine(FakeAdapter(), ob.RolloutConfig(step_execution=True, max_num_seqs=64))
    seen, sizes = set(), []
    tracemalloc.start()
    for batch in range(10):
        requests = [fake_request(f"{batch}-{i}", num_inference_steps=1 + i % 3, seed=i) for i in range(2000)]
        for output in engine.stream(requests):
            assert output.error is None
            assert output.request_id not in seen
            seen.add(output.request_id)
        del requests, output
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(seen) == 20_000
    # The ids in ``seen`` are all that may grow: well under 200 bytes each.
    assert sizes[-1] - sizes[1] < 200 * 8 * 2000
    assert not engine.has_unfinished


class TestForwardOnly:
    """Adapters that bring their own ``forward()`` and no lifecycle."""

    def requests(self, make_request, seeds, **sampling):
        return [make_request(request_id=f"seed {seed}", seed=seed, **sampling) for seed in seeds]

    def test_waves_are_packed_and_split(self, make_request):
        adapter = PackedForward()
        outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=4)).generate(
            self.requests(make_request, range(6))
        )
        assert adapter.batch_sizes == [4, 2]
        assert [output.request_id for output in outputs] == [f"seed {seed}" for seed in range(6)]
        assert [output.output.unique().tolist() for output in outputs] == [[seed] for seed in range(6)]
        assert [output.custom_output["all_log_probs"].tolist() for output in outputs] == [[[seed]] for seed in range(6)]
        assert [len(output.timesteps) for output in outputs] == [4] * 4 + [2] * 2

    def test_sizes_do_not_mix(self, make_request):
        adapter = PackedForward()
        requests = self.requests(make_request, [1, 2], height=64) + self.requests(make_request, [3], height=128)
        ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=4)).generate(requests)
        assert adapter.batch_sizes == [2, 1]

    def test_a_fault_ends_the_wave_and_the_next_one_runs(self, make_request):
        engine = ob.RolloutEngine(PackedForward(), ob.RolloutConfig(max_num_seqs=2))
        bad = make_request(request_id="bad", seed=0, num_inference_steps=0)
        outputs = engine.generate([*self.requests(make_request, [13, 1, 2]), bad], return_errors=True)
        assert [type(output.error) for output in outputs] == [RuntimeError, RuntimeError, type(None), ValueError]

    def test_a_wrong_number_of_outputs_is_an_error(self, make_request, monkeypatch):
        monkeypatch.setattr(PackedForward, "forward", lambda self, req: [])
        (output,) = ob.RolloutEngine(PackedForward()).generate([make_request()], return_errors=True)
        assert "must return an output per request, 1, got 0" in str(output.error)

    def test_without_batch_support_requests_run_one_by_one_and_it_is_told_once(self, make_request):
        adapter = SingleForward()
        with pytest.warns(UserWarning, match="max_num_seqs = 4 has no effect"):
            engine = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=4))
        engine.generate(self.requests(make_request, range(3)))
        assert adapter.batch_sizes == [1, 1, 1]

    def test_step_wise_is_refused(self):
        with pytest.raises(ValueError, match="lacks prepare_encode, denoise_step, step_scheduler, post_decode"):
            ob.RolloutEngine(PackedForward(), ob.RolloutConfig(step_execution=True))


SPECS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["x", 'a sign that says "42"', "many words " * 6]),
        "negative_prompt": st.sampled_from([None, "blurry"]),
        "num_inference_steps": st.integers(2, 4),
        "guidance": st.sampled_from([0.0, 1.0, 3.0]),
        "num_outputs_per_prompt": st.integers(1, 2),
        "sde_type": st.sampled_from(["sde", "cps", "dance_sde"]),
        "noise_level": st.sampled_from([0.0, 0.7]),
        "window": st.sampled_from([1, 2, None]),
        "logprobs": st.booleans(),
        "output_type": st.sampled_from(["image", "latent", "both"]),
        "height": st.sampled_from([64, 64, 80]),
    }
)


@pytest.mark.filterwarnings("ignore:true_cfg_scale=.* has no effect on a prompt without a negative_prompt")
@pytest.mark.parametrize("name", tiny.MODEL_NAMES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.lists(SPECS, min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    capacity=st.integers(1, 6),
    step_execution=st.booleans(),
)
def test_any_mix_equals_serial(adapters, make_request, assert_same, name, specs, order, capacity, step_execution):
    requests = []
    for index, spec in enumerate(specs):
        spec = dict(spec)
        extra_args = {key: spec.pop(key) for key in ("sde_type", "noise_level", "logprobs")}
        extra_args["sde_window_size"] = spec.pop("window") and 1
        guidance = spec.pop("guidance")
        requests.append(
            make_request(
                request_id=str(index),
                seed=index,
                guidance_scale=guidance,
                true_cfg_scale=guidance,
                extra_args=extra_args,
                **spec,
            )
        )
    expected = {request.request_id: ob.RolloutEngine(adapters[name]).generate([request])[0] for request in requests}
    order.shuffle(requests)
    engine = ob.RolloutEngine(adapters[name], ob.RolloutConfig(step_execution=step_execution, max_num_seqs=capacity))
    outputs = engine.generate(requests)
    assert [output.request_id for output in outputs] == [request.request_id for request in requests]
    for output in outputs:
        assert_same(output, expected[output.request_id])
    assert not engine.has_unfinished


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([8, 16])), min_size=1, max_size=12),
    capacity=st.integers(1, 5),
    rows_per_forward=st.sampled_from([None, 1, 4]),
    step_execution=st.booleans(),
)
def test_every_id_comes_back_once_with_its_own_bits(shapes, capacity, rows_per_forward, step_execution):
    requests = [
        ob.OmniDiffusionRequest(
            "a",
            ob.OmniDiffusionSamplingParams(num_inference_steps=s, num_outputs_per_prompt=n, height=h, seed=10 * index),
            str(index),
        )
        for index, (s, n, h) in enumerate(shapes)
    ]
    config = ob.RolloutConfig(step_execution=step_execution, max_num_seqs=capacity, rows_per_forward=rows_per_forward)
    outputs = ob.RolloutEngine(FakeAdapter(), config).generate(requests)
    assert [output.request_id for output in outputs] == [request.request_id for request in requests]
    for request, output in zip(requests, outputs):
        (expected,) = ob.RolloutEngine(FakeAdapter()).generate([request])
        assert torch.equal(output.trajectory_latents, expected.trajectory_latents)
        assert output.num_steps == request.sampling_params.num_inference_steps


def test_a_packed_forward_reports_the_rows_of_its_calls(adapter, make_request):
    requests = [make_request(request_id=str(i), seed=i, num_outputs_per_prompt=i) for i in (1, 3)]
    requests[1].sampling_params.num_inference_steps = 2
    outputs = adapter.forward(ob.DiffusionRequestBatch(requests))
    assert [output.rows_per_forward for output in outputs] == [4, 4]


def test_what_is_no_adapter_configuration_or_list_is_named(adapters, make_request):
    adapter = adapters["tiny-sd35"]
    with pytest.raises(ValueError, match=r"got StableDiffusion3Pipeline; omnibatch\.load wraps a pipeline"):
        ob.RolloutEngine(adapter.pipeline)
    with pytest.raises(ValueError, match="config must be a RolloutConfig, got dict"):
        ob.RolloutEngine(adapter, {"max_num_seqs": 4})
    with pytest.raises(ValueError, match="requests must be a list of requests, got a single one"):
        ob.RolloutEngine(adapter).generate(make_request())


@pytest.mark.parametrize("field", ["latents", "prompt_embeds"])
def test_integers_where_numbers_are_needed_are_named(adapters, make_request, field):
    adapter = adapters["tiny-sd35"]
    (output,) = ob.RolloutEngine(adapter).generate([make_request()])
    prompt = {"prompt_embeds": output.prompt_embeds[0], "pooled_prompt_embeds": output.pooled_prompt_embeds[0]}
    values = {"latents": output.latents} | prompt
    changed = prompt | ({field: values[field].long()} if field in prompt else {})
    latents = values["latents"].long() if field == "latents" else None
    (bad,) = ob.RolloutEngine(adapter).generate([make_request(changed, latents=latents)], return_errors=True)
    assert f"{field} must be of a floating-point dtype, got torch.int64" in str(bad.error)
