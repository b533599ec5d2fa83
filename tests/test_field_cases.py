"""Faults that users of batching engines reported, each as an input with its right result.

The numbers are those of the collection; "equals alone" means the result of the same request run serially: within 1e-5
(times what guidance multiplies it by), and to the bit once ``rows_per_forward`` fixes the shapes.
"""

import re
import warnings
from dataclasses import replace

import pytest
import torch

import omnibatch as ob
from omnibatch.algorithms import training_fields
from omnibatch.prompt_files import make_requests
from omnibatch.request import RequestAborted
from omnibatch.sde import sample_step, schedule_coefficients
from omnibatch.step_batch import StepBatch
from omnibatch.step_state import StepRequestState

PROMPT = 'a sign that says "42"'
SHORT, LONG = "red sign", "a sign that says a lot of words " * 5
BATCHING = {
    "request": ob.RolloutConfig(max_num_seqs=16),
    "step": ob.RolloutConfig(step_execution=True, max_num_seqs=16),
}
GUIDED = {"guidance_scale": 4.0, "true_cfg_scale": 4.0}


@pytest.fixture(params=BATCHING.values(), ids=BATCHING.keys())
def config(request):
    return request.param


@pytest.fixture
def run(adapter, config):
    """Run requests together."""
    return lambda requests, **options: ob.RolloutEngine(adapter, config).generate(requests, **options)


@pytest.fixture
def alone(adapter):
    """Run each request on its own, serially."""
    return lambda requests: [ob.RolloutEngine(adapter).generate([request])[0] for request in requests]


@pytest.fixture
def equals_alone(adapter, config, run, alone, assert_same):
    """Check requests together against each alone: within the tolerance, and to the bit with fixed rows."""
    fixed = replace(config, rows_per_forward=4)

    def check(requests):
        outputs = run(requests)
        for output, expected in zip(outputs, alone(requests), strict=True):
            assert_same(output, expected)
        for request, output in zip(requests, ob.RolloutEngine(adapter, fixed).generate(requests), strict=True):
            (expected,) = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4)).generate([request])
            assert_same(output, expected, tolerance=0)
        return outputs

    return check


@pytest.fixture
def count_calls(monkeypatch):
    """Count the rows of each call of a module's forward."""

    def watch(module, method="forward"):
        rows, original = [], getattr(module, method)

        def counting(*arguments, **keywords):
            first = arguments[0] if arguments else next(iter(keywords.values()))
            rows.append(len(first))
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, method, counting)
        return rows

    return watch


def test_01_identical_requests_are_identical(equals_alone, make_request):
    outputs = equals_alone([make_request(request_id=str(index), seed=3) for index in range(5)])
    for output in outputs[1:]:
        torch.testing.assert_close(output.trajectory_latents, outputs[0].trajectory_latents, atol=1e-5, rtol=0)


def test_02_padded_text_changes_nothing(adapters, make_request, equals_alone, adapter):
    requests = [make_request(p, p, "blurry " * n, **GUIDED) for p, n in ((SHORT, 9), (LONG, 1))]
    equals_alone(requests)
    batch = states_batch(adapter, requests)
    with torch.no_grad():
        expected = adapter.denoise_step(batch)
    masked = [rows for rows in batch.forwards if rows.prompt_embeds_mask is not None]
    assert bool(masked) == adapter.has_text_mask
    for rows in masked:
        rows.prompt_embeds[~rows.prompt_embeds_mask] = 1e4 * torch.randn(rows.prompt_embeds.shape[-1])
    with torch.no_grad():
        assert torch.equal(adapter.denoise_step(batch), expected)


def states_batch(adapter, requests):
    states = [StepRequestState(request) for request in requests]
    for state in states:
        adapter.prepare_encode(state)
    batch = StepBatch(states)
    batch.gather()
    return batch


@pytest.mark.parametrize("neighbour", [SHORT, "word " * 200])
def test_03_a_neighbours_length_does_not_matter(equals_alone, make_request, neighbour):
    limit = {"max_sequence_length": 256}
    equals_alone([make_request(PROMPT, **limit), make_request(neighbour, "neighbour", **limit)])


def test_04_outputs_of_one_request_are_three_different_ones(equals_alone, make_request):
    (output,) = equals_alone([make_request(num_outputs_per_prompt=3, output_type="both")])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(output.trajectory_latents[one, -1], output.trajectory_latents[other, -1])
        assert output.trajectory_log_probs[one].tolist() != output.trajectory_log_probs[other].tolist()
    # The default window ends before the last step, which is deterministic: one Euler step leads to the final latents.
    assert output.trajectory_latents.shape[1] == output.num_steps
    assert len({tuple(latent.flatten().tolist()) for latent in output.latents}) == 3


def test_04_each_output_is_the_one_of_its_seed(adapter, equals_alone, make_request, assert_same):
    to_the_end = {"sde_window_size": 4, "sde_window_range": [0, 4]}
    guided = {"negative_prompt": "no", "extra_args": to_the_end, **GUIDED}
    (output,) = equals_alone([make_request(num_outputs_per_prompt=3, **guided)])
    assert torch.equal(output.trajectory_latents[:, -1], output.latents)
    fixed = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4))
    (three,) = fixed.generate([make_request(num_outputs_per_prompt=3, seed=7, **guided)])
    for index in range(3):
        (one,) = fixed.generate([make_request(seed=7 + index, **guided)])
        for name in ("trajectory_latents", "trajectory_log_probs", "latents", "output"):
            assert torch.equal(getattr(three, name)[index], getattr(one, name)[0]), name


@pytest.mark.parametrize(("count", "steps"), [(4, 4), (2, 10)])
def test_05_results_keep_all_their_timesteps(equals_alone, make_request, count, steps):
    requests = [make_request(PROMPT, str(index), seed=index, num_inference_steps=steps) for index in range(count)]
    for output in equals_alone(requests):
        assert output.timesteps.shape == (steps,)
        assert output.trajectory_timesteps.shape == (1, steps - 1)
        assert output.trajectory_latents.shape[:2] == (1, steps)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_06_log_probs_are_each_requests_own_wish(equals_alone, run, make_request, order):
    requests = [make_request(request_id=str(i), seed=i, extra_args={"logprobs": w}) for i, w in enumerate(order)]
    outputs = equals_alone(requests)
    assert [output.trajectory_log_probs is not None for output in outputs] == list(order)
    both = run([make_request(request_id=str(i), seed=i) for i in range(2)])
    assert all(torch.equal(a.output, b.output) for a, b in zip(outputs, both))


def test_07_embeddings_and_masks_expand_together(equals_alone, make_request):
    requests = [
        make_request(p, p, "no", num_outputs_per_prompt=2, seed=5 * i, **GUIDED) for i, p in enumerate((SHORT, LONG))
    ]
    for output in equals_alone(requests):
        for prefix in ("", "negative_"):
            for name in ("prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds"):
                tensor = getattr(output, prefix + name)
                if tensor is not None:
                    assert len(tensor) == 2
                    assert torch.equal(tensor[0], tensor[1])


def test_08_three_requests_two_pictures_each(equals_alone, make_request):
    requests = [make_request(f"{PROMPT} {i}", f"id-{i}", seed=10 * i, num_outputs_per_prompt=2) for i in range(3)]
    outputs = equals_alone(requests)
    assert [output.request_id for output in outputs] == ["id-0", "id-1", "id-2"]
    assert [output.output.shape[0] for output in outputs] == [2, 2, 2]


@pytest.mark.parametrize("shared_noise", [False, True])
def test_09_no_noise_is_used_twice(adapter, run, monkeypatch, shared_noise):
    """Neither as initial noise nor as a step's: 3 prompts, 2 requests each, 2 outputs each."""
    drawn, draw_noise = [], StepBatch.draw_noise

    def recording(batch):
        noise = draw_noise(batch)
        assert noise is not None
        drawn.extend(noise)
        return noise

    monkeypatch.setattr(StepBatch, "draw_noise", recording)
    arguments = {"shared_noise": shared_noise, "sde_window_size": 3, "sde_window_range": [0, 3]}
    sampling = ob.OmniDiffusionSamplingParams(
        num_inference_steps=3, num_outputs_per_prompt=2, max_sequence_length=48, extra_args=arguments
    )
    outputs = run(make_requests(["one", "two", "three"], sampling, images_per_prompt=2))
    initial = [row for output in outputs for row in output.trajectory_latents[: 1 if shared_noise else 2, 0]]
    # Qwen-Image's latents are packed after they are drawn, so compare what does not depend on the order.
    rows = [tuple(row.flatten().sort().values.tolist()) for row in initial + drawn]
    assert len(rows) == (6 if shared_noise else 12) + 3 * 12
    assert len(set(rows)) == len(rows)
    if shared_noise:
        assert all(torch.equal(*output.trajectory_latents[:, 0]) for output in outputs)


def test_09_given_latents_change_no_noise(adapter, make_request, assert_same):
    engine = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4))
    whole = {"sde_window_size": 4, "sde_window_range": [0, 4], "num_outputs_per_prompt": 2}
    extra_args = {name: whole.pop(name) for name in ("sde_window_size", "sde_window_range")}
    (drawn,) = engine.generate([make_request(extra_args=extra_args, **whole)])
    (given,) = engine.generate([make_request(latents=drawn.trajectory_latents[:, 0], extra_args=extra_args, **whole)])
    assert_same(given, drawn, tolerance=0)


@pytest.mark.parametrize("mode", ["serial", "request", "step"])
def test_10_trajectories_of_a_bf16_model_are_float32(adapter, make_request, monkeypatch, mode):
    adapter = type(adapter)(copy_pipeline(adapter, torch.bfloat16), "flow_grpo")
    denoise, velocities = adapter.denoise_step, {}

    def recording(batch):
        prediction = denoise(batch)
        for state, velocity in zip(batch.states, prediction):
            velocities[state.request_id, state.step_index] = velocity[None]
        return prediction

    monkeypatch.setattr(adapter, "denoise_step", recording)
    config = {"serial": ob.RolloutConfig()} | BATCHING
    requests = [make_request(request_id=str(i), seed=i, extra_args={"sde_window_size": 2}) for i in range(2)]
    for output in ob.RolloutEngine(adapter, config[mode]).generate(requests):
        assert output.trajectory_latents.dtype == output.trajectory_log_probs.dtype == torch.float32
        start, end = output.sde_window
        table = schedule_coefficients(tuple(output.sigmas.tolist()), (start, end), noise_level=0.7, sde_type="sde")
        for index in range(end - start):
            before, after = output.trajectory_latents[:, index], output.trajectory_latents[:, index + 1]
            velocity = velocities[output.request_id, start + index]
            scored = sample_step(before, velocity, table[start + index][None], next_sample=after)
            torch.testing.assert_close(scored.log_prob, output.trajectory_log_probs[:, index], atol=1e-6, rtol=0)


def copy_pipeline(adapter, dtype):
    name = "tiny-sd35" if "Diffusion3" in type(adapter).__name__ else "tiny-qwen-image"
    return ob.load(name, device="cpu", dtype=dtype).pipeline


def test_11_the_returned_schedule_is_the_one_used(adapter, run, make_request, monkeypatch):
    seen, predict = [], adapter.predict_velocity
    monkeypatch.setattr(
        adapter, "predict_velocity", lambda *a: (seen.append(sorted(set(a[1].tolist()))), predict(*a))[1]
    )
    sigmas = [1.0, 0.8, 0.6, 0.3]
    (custom,) = run([make_request(sigmas=sigmas)])
    assert [timestep for (timestep,) in seen] == custom.timesteps.tolist()
    seen.clear()
    (output,) = run([make_request("x", negative_prompt="no", num_inference_steps=15, **GUIDED)])
    assert len(output.timesteps) == 15
    assert output.sigmas.shape == (16,)
    assert output.sigmas[-1] == 0
    # Both branches share a call where text lengths allow it, and each runs 15 times either way.
    assert len(seen) == 15
    assert torch.equal(output.timesteps, output.sigmas[:-1] * 1000)


def test_12_an_unknown_sde_type_is_named(run, make_request):
    outputs = run([make_request(extra_args={"sde_type": "foo"})], return_errors=True)
    assert isinstance(outputs[0].error, ValueError)
    assert re.search("sde_type.*'foo'", str(outputs[0].error))


@pytest.mark.parametrize("value", ["[0,5]", "(0, 5)", [0, 5], (0, 5)])
@pytest.mark.parametrize("size", [None, 5])
def test_13_a_window_may_be_a_string(run, make_request, value, size):
    window = {"sde_window_size": size, "sde_window_range": value}
    (output,) = run([make_request(num_inference_steps=8, extra_args=window)])
    assert output.sde_window == (0, 5)
    assert output.trajectory_log_probs.shape == (1, 5)


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_13_a_window_may_reach_the_last_step(equals_alone, make_request, sde_type):
    window = {"sde_window_size": 2, "sde_window_range": "[2,4]", "sde_type": sde_type}
    (output,) = equals_alone([make_request(extra_args=window)])
    assert output.sde_window == (2, 4)
    assert torch.isfinite(output.trajectory_log_probs).all()
    assert torch.isfinite(output.trajectory_latents).all()


@pytest.mark.parametrize("value", ["[0,5", "zero to five", [3, 2], [0, 9]])
def test_13_a_bad_window_is_named(run, make_request, value):
    (output,) = run([make_request(extra_args={"sde_window_size": 1, "sde_window_range": value})], return_errors=True)
    assert isinstance(output.error, ValueError)
    assert re.search(rf"sde_window_range.*{re.escape(repr(value))}", str(output.error))


def step_engine(adapter, **options):
    return ob.RolloutEngine(adapter, ob.RolloutConfig(step_execution=True, max_num_seqs=8), **options)


def drain(engine):
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def test_14_a_request_may_join_after_ten_ticks(adapter, alone, make_request, assert_same):
    requests = [make_request(request_id=name, seed=i, num_inference_steps=50) for i, name in enumerate("ab")]
    engine = step_engine(adapter)
    engine.submit(requests[0])
    for _ in range(10):
        assert engine.step() == []
    engine.submit(requests[1])
    outputs = drain(engine)
    for request, expected in zip(requests, alone(requests)):
        assert_same(outputs[request.request_id], expected)


@pytest.mark.parametrize("order", [(4, 9), (9, 4)])
def test_15_requests_leave_at_their_own_last_step(adapter, alone, make_request, assert_same, order):
    requests = [make_request(request_id=str(steps), seed=steps, num_inference_steps=steps) for steps in order]
    engine = step_engine(adapter)
    for request in requests:
        engine.submit(request)
    ended = {output.request_id: (tick, output) for tick in range(1, 10) for output in engine.step()}
    assert {name: tick for name, (tick, _) in ended.items()} == {"4": 4, "9": 9}
    for request, expected in zip(requests, alone(requests)):
        assert_same(ended[request.request_id][1], expected)


def test_16_guidance_scales_together(equals_alone, make_request):
    requests = [
        make_request(request_id=str(scale), negative_prompt="blurry", guidance_scale=scale, true_cfg_scale=scale)
        for scale in (1.0, 3.0, 6.0)
    ]
    outputs = equals_alone(requests)
    assert outputs[0].negative_prompt_embeds is None
    assert all(output.negative_prompt_embeds is not None for output in outputs[1:])
    final = [output.latents for output in outputs]
    assert not torch.equal(final[0], final[1])
    assert not torch.equal(final[1], final[2])


UNGUIDED = "true_cfg_scale=4.0 has no effect on a prompt without a negative_prompt"


@pytest.mark.filterwarnings(f"ignore:{UNGUIDED}")
def test_17_with_and_without_a_negative_prompt(adapter, equals_alone, make_request):
    """Qwen-Image is guided only with a negative prompt; SD3 takes the empty one. Both are diffusers' rules."""
    requests = [
        make_request(request_id="with", negative_prompt="blurry", **GUIDED),
        make_request(request_id="without", **GUIDED),
    ]
    outputs = equals_alone(requests)
    assert outputs[0].negative_prompt_embeds is not None
    if "QwenImage" in type(adapter).__name__:
        (unguided,) = ob.RolloutEngine(adapter).generate([make_request(true_cfg_scale=1.0)])
        assert outputs[1].negative_prompt_embeds is None
        torch.testing.assert_close(outputs[1].latents, unguided.latents, atol=1e-5, rtol=0)
    else:
        (empty,) = ob.RolloutEngine(adapter).generate([make_request(negative_prompt="", **GUIDED)])
        torch.testing.assert_close(outputs[1].latents, empty.latents, atol=7e-5, rtol=0)


@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
def test_17_guidance_without_a_negative_prompt_is_not_dropped_silently(adapters, make_request, scale):
    engine = ob.RolloutEngine(adapters["tiny-qwen-image"])
    requests = [make_request(true_cfg_scale=scale), make_request({"prompt": PROMPT}, "dict", true_cfg_scale=scale)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = engine.generate(requests)
    assert [UNGUIDED in str(warning.message) for warning in caught] == ([True, True] if scale == 4.0 else [])
    assert all(output.guidance == 1.0 for output in outputs)


@pytest.mark.parametrize("name", ["negative_promt", "neg_prompt"])
def test_17_a_slip_in_the_negative_prompts_name_is_named(run, make_request, name):
    good, bad = run([make_request(), make_request({"prompt": PROMPT, name: "no"}, "bad")], return_errors=True)
    assert good.error is None
    assert f"prompt has no field {name!r}; known are negative_prompt, " in str(bad.error)


def test_18_one_and_three_outputs_together(equals_alone, make_request):
    requests = [make_request(request_id="one"), make_request(request_id="three", num_outputs_per_prompt=3, seed=9)]
    assert [len(output.output) for output in equals_alone(requests)] == [1, 3]


def test_19_two_sizes_together(equals_alone, make_request):
    sizes = [(64, 64), (128, 64), (64, 128), (96, 96)]
    requests = [make_request(request_id=str(i), seed=i, height=h, width=w) for i, (h, w) in enumerate(sizes)]
    assert [tuple(output.output.shape[2:]) for output in equals_alone(requests)] == sizes


def test_19_large_sizes_together(adapters, make_request, assert_same):
    engine = ob.RolloutEngine(adapters["tiny-qwen-image"], ob.RolloutConfig(step_execution=True, max_num_seqs=4))
    sizes = [(256, 256), (512, 512), (512, 256), (256, 512)]
    requests = [
        make_request(request_id=str(i), seed=i, height=h, width=w, num_inference_steps=2)
        for i, (h, w) in enumerate(sizes)
    ]
    for request, output in zip(requests, engine.generate(requests)):
        (alone,) = ob.RolloutEngine(adapters["tiny-qwen-image"]).generate([request])
        assert_same(output, alone)
        assert output.output.shape[2:] == (request.sampling_params.height, request.sampling_params.width)


@pytest.mark.parametrize("name", ["height", "width"])
def test_19_a_size_beyond_the_positions_of_sd3_is_named(adapters, config, make_request, name):
    engine = ob.RolloutEngine(adapters["tiny-sd35"], config)
    good, bad = engine.generate([make_request(), make_request(request_id="large", **{name: 512})], return_errors=True)
    assert good.error is None
    assert isinstance(bad.error, ValueError)
    assert str(bad.error) == f"{name} must be at most 256, where the model's positions end, got 512"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_20_the_size_of_the_batch_does_not_matter(adapter, make_request, assert_same, config, dtype):
    if dtype != torch.float32:
        adapter = type(adapter)(copy_pipeline(adapter, dtype))
    (expected,) = ob.RolloutEngine(adapter).generate([make_request(request_id="0")])
    (fixed,) = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4)).generate([make_request(request_id="0")])
    for count in (1, 2, 4, 8):
        requests = [make_request(request_id=str(index), seed=index) for index in range(count)]
        output = ob.RolloutEngine(adapter, config).generate(requests)[0]
        if dtype == torch.float32:
            assert_same(output, expected)
        exact = ob.RolloutConfig(
            step_execution=config.step_execution, max_num_seqs=config.max_num_seqs, rows_per_forward=4
        )
        assert_same(ob.RolloutEngine(adapter, exact).generate(requests)[0], fixed, tolerance=0)


def test_21_without_a_seed_the_one_used_is_told(run, make_request):
    first, second = run([make_request(request_id=name, seed=None) for name in "ab"])
    assert not torch.equal(first.output, second.output)
    (again,) = run([make_request(seed=first.seeds[0])])
    torch.testing.assert_close(again.latents, first.latents, atol=1e-5, rtol=0)


def test_22_a_bad_height_fails_alone(run, alone, make_request, assert_same):
    good = [make_request(request_id=name, seed=index) for index, name in enumerate("abc")]
    outputs = run([good[0], make_request(request_id="bad", height=100), *good[1:]], return_errors=True)
    assert isinstance(outputs[1].error, ValueError)
    assert re.search("height.*100", str(outputs[1].error))
    for output, expected in zip([outputs[0], *outputs[2:]], alone(good)):
        assert_same(output, expected)


def test_23_a_transformer_that_raises_ends_its_pack_once(adapter, config, make_request, monkeypatch):
    engine, forward, calls = ob.RolloutEngine(adapter, config), adapter.transformer.forward, []

    def failing(*arguments, **keywords):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("the third call")
        return forward(*arguments, **keywords)

    monkeypatch.setattr(adapter.transformer, "forward", failing)
    outputs = engine.generate([make_request(request_id=name) for name in "abc"], return_errors=True)
    assert [str(output.error) for output in outputs] == ["the third call"] * 3
    assert len(calls) == 3
    assert not engine.has_unfinished
    assert engine.generate([make_request()])[0].error is None


def test_24_aborts_leave_the_others_alone(adapter, alone, make_request, assert_same, monkeypatch):
    seen, denoise = set(), adapter.denoise_step
    monkeypatch.setattr(
        adapter, "denoise_step", lambda batch: (seen.update(s.request_id for s in batch.states), denoise(batch))[1]
    )
    requests = [make_request(request_id=name, seed=index) for index, name in enumerate("abcd")]
    engine = ob.RolloutEngine(adapter, ob.RolloutConfig(step_execution=True, max_num_seqs=3))
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    assert [engine.abort(name) for name in ("b", "d", "b", "nobody")] == [True, True, False, False]
    outputs = drain(engine)
    assert isinstance(outputs["b"].error, RequestAborted)
    assert isinstance(outputs["d"].error, RequestAborted)
    assert seen == {"a", "b", "c"}
    assert not engine.abort("a")
    for name, expected in zip("ac", alone([requests[0], requests[2]])):
        assert_same(outputs[name], expected)


def test_25_ids_are_unique_in_flight(adapter, make_request):
    engine = step_engine(adapter)
    engine.submit(make_request(request_id="a"))
    with pytest.raises(ValueError, match="'a' is already in flight"):
        engine.submit(make_request(request_id="a"))
    with pytest.raises(ValueError, match="request_id must be a non-empty string, got ''"):
        engine.submit(make_request(request_id=""))
    made_up = [engine.submit(ob.OmniDiffusionRequest("a")) for _ in range(2)]
    assert len(set(made_up)) == 2
    for name in made_up:
        engine.abort(name)
    outputs = drain(engine)
    assert outputs["a"].error is None
    engine.submit(make_request(request_id="a"))


def test_26_a_late_joiner_that_cannot_be_prepared_fails_alone(adapter, alone, make_request, assert_same):
    requests = [make_request(request_id=name, seed=index, num_inference_steps=6) for index, name in enumerate("ab")]
    engine = step_engine(adapter)
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.submit(make_request(request_id="late", lora_request="missing"))
    outputs = drain(engine)
    assert "'missing'" in str(outputs["late"].error)
    for request, expected in zip(requests, alone(requests)):
        assert_same(outputs[request.request_id], expected)


def test_26_one_that_cannot_be_prepared_fails_alone_in_a_wave(run, alone, make_request, assert_same):
    good = [make_request(request_id=name, seed=index) for index, name in enumerate("ab")]
    bad = [make_request(request_id="lora", lora_request="missing"), make_request({"negative_prompt": "x"}, "no prompt")]
    outputs = run([good[0], *bad, good[1]], return_errors=True)
    assert "'missing'" in str(outputs[1].error)
    assert "prompt is missing" in str(outputs[2].error)
    for output, expected in zip((outputs[0], outputs[3]), alone(good)):
        assert_same(output, expected)


@pytest.fixture
def with_lora(adapter):
    """The adapter over its own copy of the model, with two LoRAs that change the result; none is active."""
    from peft import LoraConfig

    adapter = type(adapter)(copy_pipeline(adapter, torch.float32))
    for seed, name in enumerate(("first", "second")):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            adapter.transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v"]), name)
        generator = torch.Generator().manual_seed(seed)
        for key, weight in adapter.transformer.named_parameters():
            if f"lora_B.{name}" in key:
                weight.data.normal_(0, 0.05, generator=generator)
    adapter.transformer.disable_adapters()
    return adapter


def test_27_scales_of_one_lora_together(adapter, with_lora, config, make_request, assert_same):
    requests = [make_request(request_id=str(s), lora_request="first", lora_scale=s) for s in (1.0, 0.5, 0.0)]
    requests += [make_request(request_id="second", lora_request="second"), make_request(request_id="base")]
    before = {name: weight.clone() for name, weight in with_lora.transformer.named_parameters()}
    with_lora.transformer.enable_adapters()
    with_lora.transformer.set_adapter("second")
    outputs = ob.RolloutEngine(with_lora, config).generate(requests)
    serial = [ob.RolloutEngine(with_lora).generate([request])[0] for request in requests]
    for output, expected in zip(outputs, serial):
        assert_same(output, expected)
    assert all(torch.equal(weight, before[name]) for name, weight in with_lora.transformer.named_parameters())
    (base,) = ob.RolloutEngine(adapter).generate([make_request(request_id="0.0")])
    assert_same(outputs[2], base)
    # Without a wish the transformer runs as it stands: here with the second LoRA.
    torch.testing.assert_close(outputs[4].trajectory_latents, outputs[3].trajectory_latents, atol=1e-5, rtol=0)
    different = [outputs[index].trajectory_latents for index in (0, 1, 2, 3)]
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(different) for b in different[:i])


def test_27_scale_one_is_pefts_own_result(with_lora, make_request, assert_same):
    (asked,) = ob.RolloutEngine(with_lora).generate([make_request(lora_request="first")])
    with_lora.transformer.enable_adapters()
    with_lora.transformer.set_adapter("first")
    (active,) = ob.RolloutEngine(with_lora).generate([make_request()])
    assert_same(asked, active, tolerance=0)


def test_27_an_unknown_lora_is_named(with_lora, make_request):
    (output,) = ob.RolloutEngine(with_lora).generate([make_request(lora_request="third")], return_errors=True)
    assert "lora_request 'third' is not an adapter of the transformer, which has 'first', 'second'" in str(output.error)


def test_28_one_lora_is_one_pack_and_new_weights_are_used(with_lora, make_request, count_calls):
    rows = count_calls(with_lora, "predict_velocity")
    requests = [make_request(request_id=str(i), seed=i, num_inference_steps=2, lora_request="first") for i in range(8)]
    engine = ob.RolloutEngine(with_lora, ob.RolloutConfig(step_execution=True, max_num_seqs=8))
    before = engine.generate(requests)
    assert rows == [8, 8]
    with engine.update_weights(), torch.no_grad():
        for name, weight in with_lora.transformer.named_parameters():
            if "lora_B.first" in name:
                weight.mul_(2)
    after = engine.generate(requests)
    assert [output.weights_version for output in before + after] == [0] * 8 + [1] * 8
    assert all((a.latents - b.latents).abs().max() > 1e-3 for a, b in zip(after, before))


def test_28_rows_with_different_loras_have_their_own_bits(with_lora, config, make_request, assert_same):
    """A, none, B, A at half scale, and the transformer as it stands, in one forward and alone."""
    with_lora.transformer.enable_adapters()
    with_lora.transformer.set_adapter("second")
    wishes = [("first", None), (None, 0.0), ("second", None), ("first", 0.5), (None, None)]
    requests = [
        make_request(request_id=str(index), seed=index, lora_request=name, lora_scale=scale)
        for index, (name, scale) in enumerate(wishes)
    ]
    fixed = ob.RolloutConfig(step_execution=config.step_execution, max_num_seqs=16, rows_per_forward=4)
    outputs = ob.RolloutEngine(with_lora, fixed).generate(requests)
    for request, output in zip(requests, outputs):
        (alone,) = ob.RolloutEngine(with_lora, ob.RolloutConfig(rows_per_forward=4)).generate([request])
        assert_same(output, alone, tolerance=0)


def test_29_eight_requests_are_two_packs_of_four(adapter, make_request, count_calls):
    rows = count_calls(adapter, "predict_velocity")
    requests = [make_request(request_id=str(index), num_inference_steps=3) for index in range(8)]
    outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=4)).generate(requests)
    assert rows == [4] * 6
    assert [output.rows_per_forward for output in outputs] == [4] * 8


def test_29_each_result_says_its_own_rows(adapter, config, make_request, monkeypatch):
    predict, lengths = adapter.predict_velocity, {}
    requests = [
        make_request(f"{PROMPT} {n}", str(n), seed=10 * n, num_outputs_per_prompt=n, num_inference_steps=n + 1)
        for n in (1, 2, 3)
    ]
    requests += [
        make_request(request_id="guided", negative_prompt="blurry", seed=50, **GUIDED),
        make_request(LONG, "long", seed=60, max_sequence_length=96),
    ]

    def recording(latents, timesteps, rows, image_size):
        lengths.setdefault(rows.prompt_embeds.shape[1], set()).add(len(latents))
        return predict(latents, timesteps, rows, image_size)

    monkeypatch.setattr(adapter, "predict_velocity", recording)
    outputs = ob.RolloutEngine(adapter, config).generate(requests)
    seen = {output.request_id: output.rows_per_forward for output in outputs}
    if adapter.has_text_mask:
        # All texts are padded to one length and share every call.
        assert set(seen.values()) == {max(max(rows) for rows in lengths.values())} == {1 + 2 + 3 + 2 + 1}
    else:
        # A call takes one length; the long text's has a single row.
        short, long = sorted(lengths)
        assert seen.pop("long") == max(lengths[long]) == 1
        assert set(seen.values()) == {max(lengths[short])} == {1 + 2 + 3 + 2}


def test_30_a_negative_wait_is_named():
    with pytest.raises(ValueError, match=r"request_batch_max_wait_ms.*-1"):
        ob.RolloutConfig(request_batch_max_wait_ms=-1)


def test_31_no_forward_takes_more_rows_than_allowed(adapter, make_request, count_calls, config, assert_same):
    requests = [make_request(request_id=str(n), seed=n, num_outputs_per_prompt=n) for n in (3, 2, 1, 6)]
    expected = [ob.RolloutEngine(adapter).generate([request])[0] for request in requests]
    rows = count_calls(adapter, "predict_velocity")
    limited = ob.RolloutConfig(
        step_execution=config.step_execution, max_num_seqs=config.max_num_seqs, rows_per_forward=4
    )
    outputs = ob.RolloutEngine(adapter, limited).generate(requests)
    assert max(rows) <= 4
    for output, other in zip(outputs, expected):
        assert_same(output, other)
    rows.clear()
    guided = [make_request(str(n), str(n), "no", seed=n, num_outputs_per_prompt=n, **GUIDED) for n in (3, 6)]
    ob.RolloutEngine(adapter, limited).generate(guided)
    assert max(rows) <= 4
    assert sum(rows) >= 4 * 2 * (3 + 6)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_32_the_vae_decodes_in_chunks(adapter, make_request, count_calls, assert_same, chunk):
    requests = [make_request(request_id=str(index), seed=index, num_inference_steps=2) for index in range(8)]
    expected = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=8, decode_rows=1)).generate(requests)
    rows = count_calls(adapter.pipeline.vae, "decode")
    outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=8, decode_rows=chunk)).generate(requests)
    assert max(rows) == chunk
    assert sum(rows) == 8
    for output, other in zip(outputs, expected):
        assert_same(output, other)


@pytest.mark.filterwarnings(f"ignore:{UNGUIDED}")
@pytest.mark.parametrize("algorithm", ["diffusion_nft", "dpo"])
@pytest.mark.parametrize("mode", ["serial", "request", "step"])
@pytest.mark.parametrize("negative", [None, "blurry"])
def test_33_ode_algorithms_get_clean_latents(adapter, make_request, algorithm, mode, negative):
    config = ({"serial": ob.RolloutConfig()} | BATCHING)[mode]
    requests = [
        make_request(request_id=str(i), seed=i, negative_prompt=negative, num_outputs_per_prompt=2, true_cfg_scale=4.0)
        for i in range(2)
    ]
    ode = [make_request(request_id=str(i), seed=i, negative_prompt=negative, num_outputs_per_prompt=2,
                        true_cfg_scale=4.0, extra_args={"noise_level": 0.0}) for i in range(2)]  # fmt: skip
    outputs = ob.RolloutEngine(type(adapter)(adapter.pipeline, algorithm), config).generate(requests)
    for output, expected in zip(outputs, ob.RolloutEngine(adapter).generate(ode)):
        fields = training_fields(output, algorithm)
        assert fields["latents_clean"].dtype == torch.float32
        torch.testing.assert_close(fields["latents_clean"], expected.latents, atol=1e-5, rtol=0)
        assert output.trajectory_log_probs is None
        assert "all_log_probs" not in fields
        assert (fields["negative_prompt_embeds"] is None) == (output.negative_prompt_embeds is None)
        assert ("train_timesteps" in fields) == (algorithm == "diffusion_nft")
        if algorithm == "diffusion_nft":
            assert fields["train_timesteps"].shape == (2, 4)
    (refused,) = ob.RolloutEngine(type(adapter)(adapter.pipeline, algorithm)).generate(
        [make_request(extra_args={"noise_level": 0.7})], return_errors=True
    )
    assert f"noise_level must be 0 for {algorithm}" in str(refused.error)


@pytest.mark.parametrize("mode", ["serial", "request", "step"])
def test_34_equal_prompts_are_encoded_once(adapter, make_request, count_calls, assert_same, mode):
    config = ({"serial": ob.RolloutConfig()} | BATCHING)[mode]
    adapter = type(adapter)(copy_pipeline(adapter, torch.float32))
    calls = count_calls(adapter, "encode_tokens")
    requests = [make_request(request_id=str(index), seed=index, num_inference_steps=2) for index in range(16)]
    outputs = ob.RolloutEngine(adapter, config).generate(requests)
    assert len(calls) == 1
    fresh = type(adapter)(adapter.pipeline)
    for request, output in zip(requests, outputs):
        fresh.forget_prompts()
        assert_same(ob.RolloutEngine(fresh).generate([request])[0], output)

    guided = [make_request("y", str(i), "no", num_inference_steps=2, **GUIDED) for i in range(4)]
    calls.clear()
    ob.RolloutEngine(adapter, config).generate(guided)
    assert len(calls) == 2
    ob.RolloutEngine(adapter, config).generate([make_request("y", max_sequence_length=20, num_inference_steps=2)])
    assert len(calls) == 3


def write_in_place(encoder):
    with torch.no_grad():
        encoder.get_input_embeddings().weight.mul_(1.5)


def load(encoder, **options):
    encoder.load_state_dict({name: 1.5 * value for name, value in encoder.state_dict().items()}, **options)


def assign(encoder):
    load(encoder, assign=True)


def replace_parameter(encoder):
    embeddings = encoder.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(1.5 * embeddings.weight.detach())


@pytest.mark.parametrize("change", [write_in_place, load, assign, replace_parameter])
def test_34_new_encoder_weights_are_used(adapter, make_request, change):
    adapter = type(adapter)(copy_pipeline(adapter, torch.float32))
    engine, requests = ob.RolloutEngine(adapter), [make_request(num_inference_steps=2)]
    before = [engine.generate(requests)[0]]
    for _ in range(2):
        change(adapter.pipeline.text_encoder)
        (output,) = engine.generate(requests)
        (fresh,) = ob.RolloutEngine(type(adapter)(adapter.pipeline)).generate(requests)
        assert torch.equal(output.prompt_embeds, fresh.prompt_embeds)
        assert not torch.equal(output.prompt_embeds, before[-1].prompt_embeds)
        before.append(output)


def test_35_with_token_ids_the_tokenizers_are_never_called(adapter, make_request, assert_same, monkeypatch):
    (expected,) = ob.RolloutEngine(adapter).generate([make_request()])
    (guided,) = ob.RolloutEngine(adapter).generate([make_request(guidance_scale=4.0)])
    ids = adapter.tokenize(PROMPT)
    for name, component in adapter.pipeline.components.items():
        if name.startswith("tokenizer"):
            monkeypatch.setattr(type(component), "__call__", None)
    prompt = {"extra_prompt_ids": ids} if isinstance(ids, dict) else {"prompt_token_ids": ids}
    adapter.forget_prompts()
    (output,) = ob.RolloutEngine(adapter).generate([make_request(prompt)])
    assert_same(output, expected, tolerance=0)
    # The empty negative prompt that SD3 takes needs no tokenizer, either.
    (output,) = ob.RolloutEngine(adapter).generate([make_request(prompt, guidance_scale=4.0)])
    assert_same(output, guided, tolerance=0)


def test_35_the_empty_text_is_what_the_tokenizers_make_of_it(adapters):
    adapter = adapters["tiny-sd35"]
    clip, t5 = adapter.pipeline.tokenizer, adapter.pipeline.tokenizer_3
    assert adapter.tokenize("") == {"clip": clip("").input_ids, "t5": t5("").input_ids}


@pytest.mark.parametrize("missing", ["clip", "t5"])
def test_35_sd3_says_whose_ids_are_missing(adapters, make_request, missing):
    ids = adapters["tiny-sd35"].tokenize(PROMPT)
    del ids[missing]
    engine = ob.RolloutEngine(adapters["tiny-sd35"])
    (output,) = engine.generate([make_request({"extra_prompt_ids": ids})], return_errors=True)
    assert f"extra_prompt_ids lacks the ids of '{missing}'" in str(output.error)
