"""Requests: what is refused, where prompts are found, where noise comes from."""

import numpy as np
import pytest
import torch

from omnibatch import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams, RolloutError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_inference_steps", 0),
        ("num_inference_steps", 2.5),
        ("num_inference_steps", True),
        ("num_outputs_per_prompt", -1),
        ("height", 0),
        ("width", "64"),
        ("max_sequence_length", 0),
        ("guidance_scale", float("nan")),
        ("true_cfg_scale", "4"),
        ("seed", -1),
        ("seed", 1.5),
        ("output_type", "png"),
        ("extra_args", [1]),
        ("sigmas", [1.0, 0.5]),
        ("sigmas", [0.5] * 10),
        ("sigmas", [1.5] + [0.9 - i / 20 for i in range(9)]),
    ],
)
def test_bad_sampling_parameters_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        OmniDiffusionSamplingParams(**{field: value}).validate()


def test_integers_of_other_libraries_are_integers():
    OmniDiffusionSamplingParams(height=np.int64(64), seed=np.int32(3), guidance_scale=np.float32(2)).validate()


@pytest.mark.parametrize("request_id", ["", None, 3])
def test_bad_id_is_named(request_id):
    with pytest.raises(ValueError, match="request_id"):
        OmniDiffusionRequest("a", request_id=request_id).validate()


def test_bad_prompt_is_named():
    with pytest.raises(ValueError, match="prompt must be a string or a dict, got int"):
        OmniDiffusionRequest(3).validate()


def test_ids_are_made_up_and_differ():
    assert OmniDiffusionRequest("a").request_id != OmniDiffusionRequest("a").request_id


def test_prompt_fields_are_found_in_additional_information():
    request = OmniDiffusionRequest({"prompt": "a", "additional_information": {"negative_prompt": "b", "prompt": "c"}})
    assert request.prompt_field("prompt") == "a"
    assert request.prompt_field("negative_prompt") == "b"
    assert request.prompt_field("prompt_token_ids", "prompt_ids") is None


def test_each_output_has_its_own_generator():
    sampling = OmniDiffusionSamplingParams(seed=5, num_outputs_per_prompt=3)
    draws = [torch.randn(4, generator=generator) for generator in sampling.draw_generators()]
    expected = [torch.randn(4, generator=torch.Generator().manual_seed(5 + i)) for i in range(3)]
    assert all(torch.equal(draw, other) for draw, other in zip(draws, expected))


def test_without_a_seed_two_requests_differ():
    first, second = (OmniDiffusionSamplingParams().draw_generators()[0].initial_seed() for _ in range(2))
    assert first != second


def test_given_generators_are_used():
    given = [torch.Generator().manual_seed(i) for i in (7, 8)]
    sampling = OmniDiffusionSamplingParams(generator=given, num_outputs_per_prompt=2)
    assert sampling.draw_generators() == given
    single = OmniDiffusionSamplingParams(generator=given[0], num_outputs_per_prompt=2).draw_generators()
    assert single[0] is given[0]
    assert single[1].initial_seed() != given[0].initial_seed()


def test_a_list_of_generators_of_another_length_is_refused():
    with pytest.raises(ValueError, match="generator must be one generator or one per output"):
        OmniDiffusionSamplingParams(generator=[torch.Generator()], num_outputs_per_prompt=2).validate()


def test_rollout_error_names_every_failure():
    outputs = [DiffusionOutput("a"), DiffusionOutput("b", error=ValueError("height must be right"))]
    error = RolloutError(outputs)
    assert error.outputs is outputs
    assert str(error) == "1 of 2 requests failed\nb: ValueError: height must be right"
