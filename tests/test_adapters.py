"""Both adapters against diffusers' own pipelines, which share the modules and nothing else."""

import pytest
import torch

import omnibatch as ob
from omnibatch.request import OmniDiffusionRequest, OmniDiffusionSamplingParams
from omnibatch.step_state import StepRequestState

PROMPT, NEGATIVE = 'a sign that says "42"', "blurry"


def latents_of_diffusers(adapter, prompt, seeds, guided, steps, **arguments):
    pipeline = adapter.pipeline
    pipeline.set_progress_bar_config(disable=True)
    guidance = {"true_cfg_scale": 3.0} if "QwenImage" in type(pipeline).__name__ else {"guidance_scale": 3.0}
    if not guided:
        guidance = dict.fromkeys(guidance, 1.0)
    return pipeline(
        prompt=prompt,
        negative_prompt=NEGATIVE if guided else None,
        num_inference_steps=None if "sigmas" in arguments else steps,
        height=64,
        width=64,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        num_images_per_prompt=len(seeds),
        max_sequence_length=48,
        output_type="latent",
        **guidance,
        **arguments,
    ).images


def latents_of_omnibatch(adapter, prompt, seeds, guided, steps, config, **arguments):
    sampling = OmniDiffusionSamplingParams(
        seed=seeds[0],
        num_outputs_per_prompt=len(seeds),
        num_inference_steps=steps,
        guidance_scale=3.0 if guided else 1.0,
        true_cfg_scale=3.0 if guided else 1.0,
        max_sequence_length=48,
        output_type="latent",
        extra_args={"noise_level": 0.0},
        **arguments,
    )
    prompt = {"prompt": prompt} | ({"negative_prompt": NEGATIVE} if guided else {})
    return ob.RolloutEngine(adapter, config).generate([OmniDiffusionRequest(prompt, sampling)])[0].output


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("steps", [4, 9])
@pytest.mark.parametrize("rows_per_forward", [None, 4])
def test_without_noise_the_latents_are_diffusers_own(adapter, guided, steps, rows_per_forward):
    config = ob.RolloutConfig(step_execution=True, rows_per_forward=rows_per_forward)
    expected = latents_of_diffusers(adapter, PROMPT, [5, 6], guided, steps)
    ours = latents_of_omnibatch(adapter, PROMPT, [5, 6], guided, steps, config)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_custom_sigmas_are_diffusers_own(adapter):
    sigmas = [1.0, 0.8, 0.5, 0.3, 0.1]
    expected = latents_of_diffusers(adapter, PROMPT, [5], False, 5, sigmas=sigmas)
    ours = latents_of_omnibatch(adapter, PROMPT, [5], False, 5, ob.RolloutConfig(), sigmas=sigmas)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("guided", [False, True])
def test_sd3_may_lack_its_third_text_encoder(adapters, guided):
    adapter = adapters["tiny-sd35"]
    components = adapter.pipeline.components | {"text_encoder_3": None, "tokenizer_3": None}
    adapter = type(adapter)(type(adapter.pipeline)(**components))
    expected = latents_of_diffusers(adapter, PROMPT, [5, 6], guided, 4)
    ours = latents_of_omnibatch(adapter, PROMPT, [5, 6], guided, 4, ob.RolloutConfig())
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert list(adapter.tokenize(PROMPT)) == ["clip"]
    sampling = OmniDiffusionSamplingParams(seed=5, num_inference_steps=4, max_sequence_length=48)
    by_ids = OmniDiffusionRequest({"extra_prompt_ids": adapter.tokenize(PROMPT)}, sampling)
    by_text = OmniDiffusionRequest(PROMPT, sampling)
    one, other = ob.RolloutEngine(adapter).generate([by_ids, by_text])
    assert torch.equal(one.latents, other.latents)


def test_pictures_are_diffusers_own(adapter, make_request):
    pipeline = adapter.pipeline
    request = make_request(extra_args={"noise_level": 0.0}, output_type="both")
    (output,) = ob.RolloutEngine(adapter).generate([request])
    guidance = {"true_cfg_scale": 1.0} if "QwenImage" in type(pipeline).__name__ else {"guidance_scale": 1.0}
    picture = pipeline(
        prompt=PROMPT,
        num_inference_steps=4,
        height=64,
        width=64,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=48,
        output_type="np",
        **guidance,
    ).images[0]
    expected = (torch.from_numpy(picture).permute(2, 0, 1) * 255).round()
    assert (output.output[0].float() - expected).abs().max() <= 1


@pytest.mark.parametrize("prompt", ["x", PROMPT, "a rather long prompt " * 12])
def test_encoding_is_the_pipelines_own(adapter, prompt):
    pipeline = adapter.pipeline
    ours = adapter.encode_prompt(OmniDiffusionRequest(prompt), 48, "")
    if "QwenImage" in type(pipeline).__name__:
        embeds, _ = pipeline.encode_prompt(prompt, max_sequence_length=48)
    else:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=48
        )
        torch.testing.assert_close(ours.pooled_prompt_embeds, pooled[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.prompt_embeds, embeds[0], atol=1e-5, rtol=0)


def as_token_ids(adapter, prompt, prefix=""):
    ids = adapter.tokenize(prompt)
    return {f"{prefix}extra_prompt_ids": ids} if isinstance(ids, dict) else {f"{prefix}prompt_ids": torch.tensor([ids])}


def test_text_token_ids_and_embeddings_give_the_same_rollout(adapter, make_request, assert_same, monkeypatch):
    engine = ob.RolloutEngine(adapter)
    arguments = {"guidance_scale": 3.0, "true_cfg_scale": 3.0, "num_outputs_per_prompt": 2}
    (expected,) = engine.generate([make_request(PROMPT, negative_prompt=NEGATIVE, **arguments)])
    ids = as_token_ids(adapter, PROMPT) | as_token_ids(adapter, NEGATIVE, "negative_")
    embeds = {}
    for prefix in ("", "negative_"):
        for name in ("prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds"):
            value = getattr(expected, prefix + name)
            embeds[prefix + name] = None if value is None else value[:1]
    monkeypatch.setattr(type(adapter), "tokenize", None)
    for prompt in (ids, {"additional_information": ids}, embeds):
        (output,) = engine.generate([make_request(prompt, **arguments)])
        assert_same(output, expected, tolerance=0)


def test_padded_token_ids_and_embeddings_change_nothing(adapters, make_request, assert_same):
    adapter = adapters["tiny-qwen-image"]
    engine = ob.RolloutEngine(adapter)
    (expected,) = engine.generate([make_request(PROMPT)])
    ids = adapter.tokenize(PROMPT)
    left_padded = {"prompt_token_ids": [7, 7, 7] + ids, "prompt_mask": [0, 0, 0] + [1] * len(ids)}
    embeds = torch.cat([expected.prompt_embeds, torch.full((1, 9, expected.prompt_embeds.shape[-1]), 1e4)], dim=1)
    mask = torch.cat([expected.prompt_embeds_mask, torch.zeros(1, 9, dtype=torch.bool)], dim=1)
    for prompt in (left_padded, {"prompt_embeds": embeds, "prompt_embeds_mask": mask}):
        (output,) = engine.generate([make_request(prompt)])
        assert_same(output, expected, tolerance=0)


def test_clip_ids_may_come_padded_for_the_other_tokenizer(adapters):
    adapter = adapters["tiny-sd35"]
    ids = adapter.tokenize(PROMPT)
    padded = ids | {"clip": ids["clip"] + [ids["clip"][-1]] * 20}
    encodings = [adapter.encode_prompt(OmniDiffusionRequest({"extra_prompt_ids": i}), 48, "") for i in (ids, padded)]
    assert torch.equal(encodings[0].prompt_embeds, encodings[1].prompt_embeds)
    assert torch.equal(encodings[0].pooled_prompt_embeds, encodings[1].pooled_prompt_embeds)


QWEN_FAULTS = [
    ({}, "prompt is missing"),
    ({"prompt": 3}, "prompt must be a string, got int"),
    ({"prompt_ids": [1, 2, 3]}, "template of 34 tokens"),
    ({"prompt_ids": [0.5] * 40}, "prompt_token_ids must be one row of integers"),
    ({"prompt_ids": [1] * 40, "prompt_mask": [1] * 39}, "prompt_mask must be as long"),
    ({"prompt_embeds": torch.zeros(4, 7)}, r"prompt_embeds must have the shape \(L, "),
]
SD3_FAULTS = [
    ({}, "prompt is missing"),
    ({"prompt_ids": [1, 2, 3]}, "extra_prompt_ids is missing.*clip, t5"),
    ({"extra_prompt_ids": {"clip": [1, 2]}}, "extra_prompt_ids lacks the ids of 't5'"),
    ({"prompt_embeds": torch.zeros(4, 7)}, r"prompt_embeds must have the shape \(L, "),
]


@pytest.mark.parametrize(
    ("name", "prompt", "named"),
    [("tiny-qwen-image", *fault) for fault in QWEN_FAULTS] + [("tiny-sd35", *fault) for fault in SD3_FAULTS],
)
def test_bad_prompts_are_named(adapters, make_request, name, prompt, named):
    with pytest.raises(ValueError, match=named):
        adapters[name].prepare_encode(StepRequestState(make_request(prompt)))


def test_sd3_embeddings_need_the_pooled_ones(adapters, make_request):
    width = adapters["tiny-sd35"].transformer.config.joint_attention_dim
    with pytest.raises(ValueError, match="pooled_prompt_embeds is missing"):
        adapters["tiny-sd35"].prepare_encode(StepRequestState(make_request({"prompt_embeds": torch.zeros(4, width)})))


def test_sd3_pooled_embeddings_must_fit(adapters, make_request):
    """Or they would break the forward of every neighbour."""
    width = adapters["tiny-sd35"].transformer.config.joint_attention_dim
    prompt = {"prompt_embeds": torch.zeros(4, width), "pooled_prompt_embeds": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"pooled_prompt_embeds must have the shape .*, got \(5,\)"):
        adapters["tiny-sd35"].prepare_encode(StepRequestState(make_request(prompt)))


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"height": 100}, "height must be a multiple of 16, got 100"),
        ({"width": 72}, "width must be a multiple of 16, got 72"),
        ({"max_sequence_length": 4096}, "max_sequence_length must be at most .*, got 4096"),
        ({"latents": torch.zeros(1, 3)}, r"latents must have the shape .*, got \(1, 3\)"),
    ],
)
def test_bad_sampling_is_named(adapter, make_request, sampling, named):
    with pytest.raises(ValueError, match=named):
        adapter.prepare_encode(StepRequestState(make_request(**sampling)))


def test_a_schedule_that_diffusers_leaves_undefined_is_refused(adapters, make_request):
    """Stretching a single sigma to the terminal one divides zero by zero."""
    with pytest.raises(ValueError, match=r"num_inference_steps must be larger, .*, got 1"):
        adapters["tiny-qwen-image"].prepare_encode(StepRequestState(make_request(num_inference_steps=1)))


def test_given_latents_are_used_and_not_changed(adapter, make_request):
    (free,) = ob.RolloutEngine(adapter).generate([make_request(extra_args={"sde_window_size": 3})])
    start = free.trajectory_latents[:, 0].clone()
    given = start.clone()
    (output,) = ob.RolloutEngine(adapter).generate([make_request(latents=given, extra_args={"noise_level": 0.0})])
    assert torch.equal(output.trajectory_latents[:, 0], start)
    assert torch.equal(given, start)


def test_the_pipelines_scheduler_is_left_alone(adapter, make_request):
    before = adapter.pipeline.scheduler.timesteps.clone(), adapter.pipeline.scheduler.step_index
    ob.RolloutEngine(adapter).generate([make_request()])
    assert torch.equal(adapter.pipeline.scheduler.timesteps, before[0])
    assert adapter.pipeline.scheduler.step_index == before[1]


def test_forward_takes_a_request_or_a_batch(adapter, make_request, assert_same):
    requests = [make_request(request_id="a"), make_request("x", "b", num_inference_steps=6, num_outputs_per_prompt=2)]
    expected = ob.RolloutEngine(adapter).generate(requests)
    for output, other in zip(adapter.forward(ob.DiffusionRequestBatch(requests)), expected):
        assert_same(output, other)
    (alone,) = adapter.forward(requests[0])
    assert_same(alone, expected[0])
    with pytest.raises(ValueError, match="one picture size"):
        adapter.forward(ob.DiffusionRequestBatch([requests[0], make_request("x", "c", height=80)]))
