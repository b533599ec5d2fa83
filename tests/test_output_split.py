"""A packed result split by request."""

import pytest
import torch

from omnibatch import DiffusionOutput, DiffusionRequestBatch, OmniDiffusionRequest
from omnibatch.request_batch import split_diffusion_output_by_request


def batch(count):
    return DiffusionRequestBatch([OmniDiffusionRequest("a", request_id=str(index)) for index in range(count)])


def packed(rows, steps=4, window=4, length=4, **changed):
    """A result whose row ``r`` holds the value ``r`` everywhere, with other axes as long as asked for."""
    values = torch.arange(float(rows))

    def row_tensor(*shape):
        return values.view(-1, *[1] * len(shape)).expand(rows, *shape)

    fields = {
        "request_id": "packed",
        "output": row_tensor(3, 4, 4),
        "trajectory_latents": row_tensor(window + 1, 4, 4),
        "trajectory_log_probs": row_tensor(window),
        "trajectory_timesteps": torch.arange(float(window)),
        "timesteps": torch.arange(float(steps)),
        "sigmas": torch.arange(float(steps + 1)),
        "prompt_embeds": row_tensor(length, 4),
        "prompt_embeds_mask": torch.ones(rows, length, dtype=torch.bool),
        "seeds": list(range(rows)),
    }
    return DiffusionOutput(**(fields | changed))


def test_rows_go_to_their_requests():
    outputs = split_diffusion_output_by_request(packed(6), batch(2), num_outputs_per_prompt=3)
    assert [output.request_id for output in outputs] == ["0", "1"]
    assert [output.seeds for output in outputs] == [[0, 1, 2], [3, 4, 5]]
    for name in ("output", "trajectory_latents", "trajectory_log_probs", "prompt_embeds"):
        assert [getattr(output, name).flatten(1)[:, 0].tolist() for output in outputs] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_shared_axis_as_long_as_the_batch_is_not_cut(count):
    """Field case 5: steps, window and prompt length all equal to the number of rows."""
    result = packed(count, steps=count, window=count, length=count)
    for output in split_diffusion_output_by_request(result, batch(count), num_outputs_per_prompt=1):
        assert torch.equal(output.timesteps, result.timesteps)
        assert torch.equal(output.sigmas, result.sigmas)
        assert torch.equal(output.trajectory_timesteps, result.trajectory_timesteps)
        assert output.prompt_embeds.shape == (1, count, 4)
        assert output.trajectory_latents.shape == (1, count + 1, 4, 4)
        assert output.trajectory_log_probs.shape == (1, count)


def test_timesteps_per_row_are_cut():
    result = packed(2, trajectory_timesteps=torch.tensor([[3.0, 2.0], [1.0, 0.0]]))
    outputs = split_diffusion_output_by_request(result, batch(2), num_outputs_per_prompt=1)
    assert [output.trajectory_timesteps.tolist() for output in outputs] == [[[3.0, 2.0]], [[1.0, 0.0]]]


def test_requests_may_have_different_numbers_of_outputs():
    outputs = split_diffusion_output_by_request(packed(4), batch(2), num_outputs_per_prompt=[1, 3])
    assert [len(output.output) for output in outputs] == [1, 3]


def test_custom_fields_are_cut_by_name():
    custom = {"all_latents": torch.arange(2.0).view(2, 1), "all_timesteps": torch.zeros(2), "note": "kept"}
    custom |= {"all_log_probs": [[-1.0], [-2.0]], "sizes": (64, 64)}
    outputs = split_diffusion_output_by_request(packed(2, custom_output=custom), batch(2), num_outputs_per_prompt=1)
    assert [output.custom_output["all_latents"].tolist() for output in outputs] == [[[0.0]], [[1.0]]]
    assert all(torch.equal(output.custom_output["all_timesteps"], torch.zeros(2)) for output in outputs)
    assert [output.custom_output["all_log_probs"] for output in outputs] == [[[-1.0]], [[-2.0]]]
    assert all(output.custom_output["note"] == "kept" for output in outputs)
    assert all(output.custom_output["sizes"] == (64, 64) for output in outputs)


def test_one_request_may_be_given_as_it_is():
    request = OmniDiffusionRequest("a", request_id="alone")
    (output,) = split_diffusion_output_by_request(packed(2), request, num_outputs_per_prompt=2)
    assert output.request_id == "alone"
    assert len(output.output) == 2


@pytest.mark.parametrize(
    ("changed", "counts", "named"),
    [
        ({"output": torch.zeros(3, 1)}, 1, "output must have 2 rows, one per output, got 3"),
        ({"seeds": [1]}, 1, "seeds must have 2 rows"),
        ({}, [1], "num_outputs_per_prompt must hold 2 numbers, got 1"),
        ({"custom_output": {"mystery": torch.zeros(2)}}, 1, "custom_output: it is not known whether 'mystery'"),
        ({"custom_output": {"rewards": [0.1, 0.9]}}, 1, "custom_output: it is not known whether 'rewards'"),
        ({"timesteps": torch.zeros(2, 4)}, 1, r"timesteps is shared by all rows .* got shape \(2, 4\)"),
    ],
)
def test_what_does_not_fit_is_named(changed, counts, named):
    with pytest.raises(ValueError, match=named):
        split_diffusion_output_by_request(packed(2, **changed), batch(2), num_outputs_per_prompt=counts)
