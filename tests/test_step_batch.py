"""Rows laid out in transformer calls."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omnibatch import OmniDiffusionRequest, OmniDiffusionSamplingParams
from omnibatch.step_batch import PromptEncoding, StepBatch, StepRequestState, pad_rows, padded_text_length


def state(text_length=5, outputs=1, guided=False, masked=True, fill=1.0, negative_length=2):
    request = OmniDiffusionRequest("a", OmniDiffusionSamplingParams(num_outputs_per_prompt=outputs))

    def encoding(length):
        mask = torch.ones(length, dtype=torch.bool) if masked else None
        return PromptEncoding(torch.full((length, 3), fill), mask)

    result = StepRequestState(request, prompt_encoding=encoding(text_length), latents=torch.zeros(outputs, 4, 6))
    result.schedule = torch.arange(12.0).reshape(2, 6) + fill
    result.timesteps = torch.tensor([2.0, 1.0])
    if guided:
        result.negative_encoding, result.guidance = encoding(negative_length), 4.0
    return result


def test_all_rows_share_one_call_and_short_text_is_masked():
    batch = StepBatch([state(5, outputs=2), state(3, guided=True, fill=2.0)])
    (call,) = batch.forwards
    assert call.source.tolist() == [0, 1, 2, 2]
    assert call.target.tolist() == [0, 1, 2, 3]
    assert call.prompt_embeds.shape == (4, 5, 3)
    assert call.prompt_embeds_mask.sum(dim=1).tolist() == [5, 5, 3, 2]
    assert call.prompt_embeds[:, :, 0].sum(dim=1).tolist() == [5.0, 5.0, 6.0, 4.0]
    assert batch.guided_rows.tolist() == [2]
    assert batch.guidance.tolist() == [4.0]


def test_nothing_padded_needs_no_mask():
    (call,) = StepBatch([state(4), state(4)]).forwards
    assert call.prompt_embeds_mask is None


def test_a_mask_with_a_hole_is_kept():
    holed = state(4)
    holed.prompt_encoding.prompt_embeds_mask[1] = False
    (call,) = StepBatch([holed]).forwards
    assert call.prompt_embeds_mask.tolist() == [[True, False, True, True]]


def test_fixed_rows_fill_every_call_and_pad_by_the_prompt_alone():
    batch = StepBatch([state(5, outputs=5), state(40, guided=True)], rows_per_forward=4)
    shapes = [(len(call.source), call.prompt_embeds.shape[1], call.num_rows) for call in batch.forwards]
    assert shapes == [(4, 32, 4), (4, 32, 2), (4, 64, 1)]
    assert sorted(t for call in batch.forwards for t in call.target.tolist()) == list(range(7))
    assert all(call.prompt_embeds_mask is not None for call in batch.forwards)


def test_text_without_a_mask_is_never_padded():
    batch = StepBatch([state(5, masked=False), state(7, masked=False), state(5, masked=False)])
    assert [(call.source.tolist(), call.prompt_embeds.shape[1]) for call in batch.forwards] == [([0, 2], 5), ([1], 7)]


def test_gather_takes_each_row_at_its_own_step():
    first, second = state(outputs=2), state(fill=100.0)
    second.step_index = 1
    batch = StepBatch([first, second])
    batch.gather()
    assert batch.timesteps.tolist() == [1.0, 1.0, 106.0]
    assert batch.coefficients.shape == (3, 5)
    assert batch.coefficients[2].tolist() == [107.0, 108.0, 109.0, 110.0, 111.0]


def test_scatter_gives_rows_back_and_records_the_window():
    first, second = state(outputs=2), state()
    first.sde_window, first.noisy, first.logprobs = (0, 1), True, True
    batch = StepBatch([first, second])
    batch.gather()
    after = torch.arange(3.0).view(3, 1, 1).expand(3, 4, 6)
    batch.scatter(after, torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(first.latents, after[:2])
    assert torch.equal(second.latents, after[2:])
    assert (first.step_index, second.step_index) == (1, 1)
    assert [tensor.shape for tensor in first.trajectory_latents] == [(2, 4, 6)] * 2
    torch.testing.assert_close(first.trajectory_log_probs[0], torch.tensor([0.1, 0.2]))
    assert second.trajectory_log_probs == []


def test_noise_is_drawn_only_for_noisy_rows_from_their_own_generators():
    quiet, noisy = state(), state(outputs=2)
    noisy.sde_window, noisy.noisy = (0, 1), True
    noisy.generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    assert StepBatch([quiet]).draw_noise() is None
    noise = StepBatch([quiet, noisy]).draw_noise()
    expected = [torch.randn((4, 6), generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    assert torch.equal(noise, torch.stack([torch.zeros(4, 6), *expected]))


@pytest.mark.parametrize(("length", "padded"), [(1, 32), (32, 32), (33, 64)])
def test_padded_text_length(length, padded):
    assert padded_text_length(length) == padded


def test_pad_rows():
    assert pad_rows(torch.ones(2, 3), 4).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert pad_rows(torch.ones(2, dtype=torch.bool), 3).tolist() == [True, True, False]


class NoReading(TorchDispatchMode):
    """Refuses what would make the host wait for a device: reading a number, or asking which elements are true."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows_per_forward", [None, 4])
def test_a_step_reads_nothing_back_from_the_device(adapter, make_request, rows_per_forward):
    states = [
        StepRequestState(make_request("a sign", "plain", seed=1, num_outputs_per_prompt=2)),
        StepRequestState(make_request("a sign", "guided", "ugly", seed=5, guidance_scale=3.0, true_cfg_scale=3.0)),
    ]
    for state in states:
        adapter.prepare_encode(state)
    batch = StepBatch(states, rows_per_forward)
    for _ in range(2):
        with torch.no_grad(), NoReading():
            batch.gather()
            adapter.step_scheduler(batch, adapter.denoise_step(batch))
    assert [state.step_index for state in states] == [2, 2]
