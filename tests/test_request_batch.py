"""Packed requests and the windows drawn for them."""

import pytest
import torch

from omnibatch import DiffusionRequestBatch, OmniDiffusionRequest
from omnibatch.request_batch import sample_per_sample_sde_windows


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
