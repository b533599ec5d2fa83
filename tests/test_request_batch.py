"""Packed requests and the windows drawn for them."""

import pytest
import torch

from omnibatch import DiffusionRequestBatch, OmniDiffusionRequest, OmniDiffusionSamplingParams
from omnibatch.request_batch import collate_prompt_mask, collate_prompt_rows, sample_per_sample_sde_windows


def windows(**arguments):
    defaults = {
        "sde_window_size": 2,
        "sde_window_range": (0, 5),
        "num_timesteps": 10,
        "batch_size": 3,
        "generator": None,
    }
    return sample_per_sample_sde_windows(**(defaults | {"device": torch.device("cpu")} | arguments))


def test_batch_lists_its_requests():
    requests = [OmniDiffusionRequest("a", request_id="x"), OmniDiffusionRequest({"prompt": "b"}, request_id="y")]
    batch = DiffusionRequestBatch(requests)
    assert (batch.num_reqs, batch.request_ids, batch.prompts) == (2, ["x", "y"], ["a", {"prompt": "b"}])
    assert batch.get("y") is requests[1]
    assert batch.sampling_params_list == [request.sampling_params for request in requests]
    assert DiffusionRequestBatch(requests[:1]).sampling_params is requests[0].sampling_params
    with pytest.raises(ValueError, match="sampling_params is for one request"):
        _ = batch.sampling_params
    with pytest.raises(KeyError):
        batch.get("z")


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match="at least one request"):
        DiffusionRequestBatch([])
    with pytest.raises(ValueError, match="'x' appears more than once"):
        DiffusionRequestBatch([OmniDiffusionRequest("a", request_id="x")] * 2)


def test_no_size_takes_all_steps_but_the_last():
    assert windows(sde_window_size=None) == [(0, 9)] * 3


def test_one_generator_is_one_shared_draw():
    start = int(torch.randint(0, 4, (1,), generator=torch.Generator().manual_seed(1)))
    assert windows(generator=torch.Generator().manual_seed(1)) == [(start, start + 2)] * 3


def test_each_row_draws_from_its_own_generator():
    drawn = windows(generator=[torch.Generator().manual_seed(seed) for seed in range(3)])
    starts = [int(torch.randint(0, 4, (1,), generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    assert drawn == [(start, start + 2) for start in starts]


def test_bad_windows_are_named():
    with pytest.raises(ValueError, match="generator must hold batch_size = 3"):
        windows(generator=[torch.Generator()])
    with pytest.raises(ValueError, match="sde_window_size"):
        windows(sde_window_size=6)


def rows(prompts, default=None, **arguments):
    return collate_prompt_rows(prompts, ["ids", "token_ids"], default, device="cpu", field_name="ids", **arguments)


def test_rows_are_padded_on_the_right():
    tensor, lengths = rows([{"ids": [1, 2, 3]}, {"token_ids": torch.tensor([4])}], pad_value=9)
    assert tensor.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert lengths == [3, 1]


def test_rows_are_padded_on_the_left_and_to_a_length():
    tensor, lengths = rows([{"ids": [1, 2]}, {"ids": [[3]]}], pad_side="left", target_len=4)
    assert tensor.tolist() == [[0, 0, 1, 2], [0, 0, 0, 3]]
    assert lengths == [2, 1]


def test_rows_are_found_in_additional_information():
    assert rows([{"additional_information": {"ids": [5]}}])[0].tolist() == [[5]]


def test_rows_nobody_has_are_the_default_or_none():
    assert rows(["a", {}]) == (None, None)
    assert rows(["a", {}], torch.tensor([[1, 2], [3, 4]]))[0].tolist() == [[1, 2], [3, 4]]
    assert rows(["a"], [1, 2])[0].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompts": [{"ids": [1]}, "b"]}, "ids must be given for all .* prompt 1 lacks it"),
        ({"prompts": [{"ids": torch.zeros(2, 3)}]}, r"ids of prompt 0 must be one row, got the shape \(2, 3\)"),
        ({"prompts": [{"ids": 5}]}, r"ids of prompt 0 must be one row, got the shape \(\)"),
        ({"prompts": ["a", "b"], "default": torch.zeros(3, 2)}, "ids: the default must have 2 rows, got 3"),
        (
            {"prompts": [{"ids": [1, 2, 3]}], "target_len": 2},
            "ids must have at most target_len = 2 values a row, got 3",
        ),
        ({"prompts": [{"ids": [1]}], "pad_side": "middle"}, "pad_side must be 'right' or 'left', got 'middle'"),
    ],
)
def test_bad_rows_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        rows(**arguments)


def mask(prompts, default=None, lengths=None, length=4, **arguments):
    return collate_prompt_mask(
        prompts,
        ["mask"],
        default,
        device="cpu",
        field_name="mask",
        token_lengths=lengths,
        target_seq_len=length,
        **arguments,
    )


def test_an_explicit_mask_is_padded_or_cut():
    assert mask([{"mask": [1, 0]}, {"mask": [1, 1, 1, 1, 1]}]).int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert mask([{"mask": [0, 1]}, {"mask": [0, 1, 1, 1, 1]}], pad_side="left").int().tolist() == [
        [0, 0, 0, 1],
        [1, 1, 1, 1],
    ]


def test_lengths_imply_a_mask():
    assert mask(["a", "b"], lengths=[2, 9]).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert mask(["a"], lengths=[1], pad_side="left").int().tolist() == [[0, 0, 0, 1]]
    assert mask(["a", "b"]) is None
    assert mask(["a"], default=torch.ones(1, 2)).int().tolist() == [[1, 1, 0, 0]]


def test_bad_masks_are_named():
    with pytest.raises(ValueError, match="mask must be given for all"):
        mask([{"mask": [1]}, "b"])
    with pytest.raises(ValueError, match="mask: token_lengths must hold 2 lengths, got 1"):
        mask(["a", "b"], lengths=[2])


def batch_of(**sampling):
    values = [dict(zip(sampling, row)) for row in zip(*sampling.values())]
    return DiffusionRequestBatch([OmniDiffusionRequest("a", OmniDiffusionSamplingParams(**row)) for row in values])


def test_request_tensors_are_joined():
    latents = [torch.full((2, 3), float(value)) for value in range(2)]
    assert torch.equal(batch_of(latents=latents).collate_request_tensors("latents"), torch.cat(latents))
    default = torch.ones(1)
    assert batch_of(latents=[None, None]).collate_request_tensors("latents", default) is default
    with pytest.raises(ValueError, match="latents must be given for all"):
        batch_of(latents=[latents[0], None]).collate_request_tensors("latents")
    with pytest.raises(ValueError, match=r"latents must have one shape .*\(2, 3\), \(1, 4\)"):
        batch_of(latents=[latents[0], torch.ones(1, 4)]).collate_request_tensors("latents")


def test_request_generators_are_one_per_row():
    generators = batch_of(seed=[5, 9]).collate_request_generators(2)
    assert [generator.initial_seed() for generator in generators] == [5, 6, 9, 10]
    default = torch.Generator()
    assert batch_of(seed=[None, None]).collate_request_generators(2, default) is default
    one_each = batch_of(seed=[5, 9]).collate_request_generators([1, 3])
    assert [generator.initial_seed() for generator in one_each] == [5, 9, 10, 11]
    with pytest.raises(ValueError, match="num_outputs_per_prompt must hold 2 numbers, got 1"):
        batch_of(seed=[5, 9]).collate_request_generators([1])
