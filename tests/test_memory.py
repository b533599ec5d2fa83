"""What fits."""

import warnings

import pytest
import torch

import omnibatch as ob
from omnibatch import runner
from omnibatch.memory import activation_bytes_per_row, available_bytes, largest_that_fits


def test_the_estimate_bounds_what_a_block_holds(adapter):
    """Against the outputs that really live at a block's widest point: the MLP's, beside the residual stream."""
    sizes = []

    def note(module, arguments, output):
        tensor = output[0] if isinstance(output, tuple) else output
        sizes.append(tensor[0].numel() * tensor.element_size())

    feed_forward = [m for n, m in adapter.transformer.named_modules() if n.endswith(("ff.net.0", "img_mlp.net.0"))]
    handle = feed_forward[0].register_forward_hook(note)
    request = ob.OmniDiffusionRequest(
        "x", ob.OmniDiffusionSamplingParams(seed=1, num_inference_steps=2, guidance_scale=1.0, max_sequence_length=32)
    )
    (output,) = ob.RolloutEngine(adapter).generate([request])
    handle.remove()
    estimate = activation_bytes_per_row(adapter, 64, 64, output.prompt_embeds.shape[1])
    image_tokens = 16
    inner = sizes[0] // (4 * image_tokens * 4)
    assert estimate == 11 * (image_tokens + output.prompt_embeds.shape[1]) * inner * 4


def test_half_precision_takes_half(adapters):
    full = adapters["tiny-sd35"]
    half = ob.load("tiny-sd35", device="cpu", dtype=torch.bfloat16)
    assert activation_bytes_per_row(full, 64, 64, 109) == 2 * activation_bytes_per_row(half, 64, 64, 109)


def test_available_memory_is_a_sensible_number():
    assert 2**20 < available_bytes(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("peaks", "limit", "rows"),
    [
        ({4: 1400, 8: 1800}, 3000, 20),
        ({4: 1400, 8: 1800, 16: 2600}, 2600, 16),
        ({1: 1000, 2: 1000}, 1000, 1),
    ],
)
def test_a_line_through_the_peaks_says_what_fits(peaks, limit, rows):
    assert largest_that_fits(peaks, limit) == rows


def test_a_run_that_will_not_fit_is_warned_of_once(adapter, make_request, monkeypatch):
    per_row = activation_bytes_per_row(adapter, 64, 64, 32)
    monkeypatch.setattr(runner, "available_bytes", lambda device: 3 * per_row)
    engine = ob.RolloutEngine(adapter, ob.RolloutConfig(step_execution=True, max_num_seqs=8))
    requests = [make_request(request_id=str(i), seed=i, num_inference_steps=2 + i % 2) for i in range(8)]
    with pytest.warns(
        UserWarning, match="a transformer call with 8 rows needs about .*set rows_per_forward to"
    ) as caught:
        engine.generate(requests)
    assert len(caught) == 1


def test_who_follows_the_advice_is_not_warned_again(adapter, make_request, monkeypatch):
    text_length = 32 if adapter.encode_prompt(make_request(), 48, "").prompt_embeds_mask is not None else 128
    monkeypatch.setattr(
        runner, "available_bytes", lambda device: 5 * activation_bytes_per_row(adapter, 64, 64, text_length)
    )
    requests = [make_request(request_id=str(i), seed=i, num_inference_steps=2) for i in range(8)]
    with pytest.warns(UserWarning, match="MiB of activations") as caught:
        ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=8)).generate(requests)
    advice = int(str(caught[0].message).rsplit(" ", 1)[1])
    assert 1 < advice < 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=8, rows_per_forward=advice)).generate(requests)
