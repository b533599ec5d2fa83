"""Replayed log-probs against the rollout's, to the bit where shapes are fixed."""

import pytest
import torch
from fake_adapter import PackedForward

import omnibatch as ob
from omnibatch import tiny
from omnibatch.algorithms import training_fields
from omnibatch.replay import compare_replay, replay_log_probs, replay_steps, stack_outputs

MODES = {
    "serial": {},
    "request": {"max_num_seqs": 8},
    "step": {"step_execution": True, "max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def loaded():
    return {
        (name, dtype): ob.load(name, device="cpu", dtype=dtype)
        for name in tiny.MODEL_NAMES
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.fixture
def ragged_requests(make_request):
    window = {"sde_window_size": 2, "sde_window_range": [0, 4]}
    guided = {"guidance_scale": 4.0, "true_cfg_scale": 4.0}
    return lambda: [
        make_request("x", "short", extra_args=window),
        make_request(
            "many words " * 9, "guided", "blurry", seed=10, extra_args=window, num_outputs_per_prompt=2, **guided
        ),
        make_request("a red sign", "cps", seed=20, num_inference_steps=6, extra_args={"sde_type": "cps"}),
        make_request(
            "a sign", "dance", "ugly", seed=30, extra_args={"sde_type": "dance_sde", "noise_level": 0.3}, **guided
        ),
    ]


@pytest.mark.parametrize("name", tiny.MODEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
def test_with_fixed_rows_the_first_ratio_is_one(loaded, name, dtype, mode, requires_grad, ragged_requests):
    adapter = loaded[name, dtype]
    outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4, **MODES[mode])).generate(ragged_requests())
    replayed = replay_log_probs(adapter, outputs, micro_batch_size=4, requires_grad=requires_grad)
    for output, log_probs in zip(outputs, replayed):
        assert log_probs.shape == output.trajectory_log_probs.shape
        assert torch.equal(log_probs.detach(), output.trajectory_log_probs)
    report = compare_replay(adapter, outputs[::-1], micro_batch_size=4)
    assert report.is_exact
    assert report.largest_log_ratio == 0
    assert report.largest_mean_difference < 2e-6


def test_without_fixed_rows_the_difference_is_small_and_told(adapter, ragged_requests):
    outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=8)).generate(ragged_requests())
    report = compare_replay(adapter, outputs, micro_batch_size=4)
    assert 0 <= report.mean_log_ratio <= report.largest_log_ratio < 1e-4
    assert report.largest_mean_difference < 1e-5
    for log_probs, output in zip(replay_log_probs(adapter, outputs), outputs):
        torch.testing.assert_close(log_probs, output.trajectory_log_probs, atol=1e-5, rtol=0)


def test_a_wrong_velocity_shows_in_the_mean_where_the_log_prob_hides_it(adapter, make_request, monkeypatch):
    """A next latent lies around the predicted mean, so a rollout that was wrong all along replays its own log-prob."""
    request = make_request(extra_args={"sde_window_size": 1, "sde_window_range": [0, 1]})
    outputs = ob.RolloutEngine(adapter).generate([request])
    predict = adapter.predict_velocity
    monkeypatch.setattr(adapter, "predict_velocity", lambda *arguments: predict(*arguments) + 0.05)
    report = compare_replay(adapter, outputs)
    assert report.largest_mean_difference > 1e-3
    assert report.largest_log_ratio < report.largest_mean_difference


def test_gradients_reach_the_transformer(adapter, make_request):
    outputs = ob.RolloutEngine(adapter).generate([make_request(), make_request(request_id="b", seed=5)])
    weight = next(parameter for parameter in adapter.transformer.parameters() if parameter.dim() == 2)
    replayed = replay_log_probs(adapter, outputs, requires_grad=True)
    sum(log_probs.sum() for log_probs in replayed).backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    adapter.transformer.zero_grad(set_to_none=True)
    assert not replay_log_probs(adapter, outputs)[0].requires_grad


def test_noise_that_cannot_be_drawn_again_leaves_the_mean_unknown(adapter, make_request):
    request = make_request(generator=torch.Generator().manual_seed(3), seed=None)
    outputs = ob.RolloutEngine(adapter).generate([request])
    report = compare_replay(adapter, outputs)
    assert report.largest_mean_difference is None
    assert report.largest_log_ratio < 1e-5


@pytest.mark.parametrize("how", ["drawn", "shared", "given"])
def test_the_seed_draws_the_noise_again_wherever_the_latents_came_from(adapter, make_request, how):
    engine = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4))
    sampling = {"num_outputs_per_prompt": 2, "extra_args": {"shared_noise": how == "shared"}}
    if how == "given":
        (drawn,) = engine.generate([make_request(num_outputs_per_prompt=2)])
        sampling |= {"latents": drawn.trajectory_latents[:, 0]}
    report = compare_replay(adapter, engine.generate([make_request(**sampling)]), micro_batch_size=4)
    assert report.is_exact
    assert report.largest_mean_difference < 1e-5


def test_replayed_means_give_the_kl_divergence_of_two_policies(adapter, make_request):
    outputs = ob.RolloutEngine(adapter).generate(
        [make_request(num_outputs_per_prompt=2), make_request(request_id="b", seed=9)]
    )
    policy = replay_steps(adapter, outputs)
    weight = next(parameter for parameter in adapter.transformer.parameters() if parameter.dim() == 2)
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.05)
    try:
        reference = replay_steps(adapter, outputs, requires_grad=True)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    for one, other, output in zip(policy, reference, outputs):
        assert one.means.shape == (len(output.seeds), 3, *output.latents.shape[1:])
        assert not one.means.requires_grad
        assert other.means.requires_grad
        width = one.noise_scales.double().view(1, -1, *[1] * (one.means.dim() - 2))
        assert torch.equal(one.noise_scales, other.noise_scales)
        # Against torch's own distributions, in float64.
        ours, theirs = (torch.distributions.Normal(steps.means.detach().double(), width) for steps in (one, other))
        expected = torch.distributions.kl_divergence(ours, theirs).flatten(2).mean(2)
        kl = (one.means - other.means.detach()).square().flatten(2).mean(2) / (2 * one.noise_scales**2)
        torch.testing.assert_close(kl.double(), expected, rtol=1e-4, atol=0)
        assert (kl > 0).all()
        # The stored next latents are as likely as the log-probs say.
        likely = ours.log_prob(output.trajectory_latents[:, 1:].double()).flatten(2).mean(2)
        torch.testing.assert_close(likely.float(), one.log_probs, atol=1e-5, rtol=0)


def test_outputs_without_log_probs_are_named(adapter, make_request):
    (silent,) = ob.RolloutEngine(adapter).generate([make_request(request_id="silent", extra_args={"logprobs": False})])
    with pytest.raises(ValueError, match="output 'silent' has no log-probs"):
        replay_log_probs(adapter, [silent])
    with pytest.raises(ValueError, match="output 'failed' has no log-probs"):
        replay_log_probs(adapter, [ob.DiffusionOutput("failed", error=ValueError())])


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_wrong_micro_batch_is_named(adapter, make_request, size):
    outputs = ob.RolloutEngine(adapter).generate([make_request()])
    with pytest.raises(ValueError, match=f"micro_batch_size must be a positive integer, got {size}"):
        replay_log_probs(adapter, outputs, micro_batch_size=size)


def test_an_adapter_without_the_lifecycle_is_named(adapter, make_request):
    outputs = ob.RolloutEngine(adapter).generate([make_request()])
    with pytest.raises(ValueError, match="adapter must be a RolloutAdapter for a replay, got PackedForward"):
        replay_log_probs(PackedForward(), outputs)


def test_stacked_outputs_keep_every_row(adapter, ragged_requests):
    outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=8)).generate(ragged_requests()[:2])
    stacked = stack_outputs(outputs)
    assert torch.equal(stacked["all_latents"], torch.cat([output.trajectory_latents for output in outputs]))
    assert torch.equal(stacked["all_log_probs"], torch.cat([output.trajectory_log_probs for output in outputs]))
    assert stacked["sde_windows"].tolist() == [list(o.sde_window) for o in outputs for _ in o.seeds]
    first_row = 0
    for output in outputs:
        rows = slice(first_row, first_row + len(output.seeds))
        first_row += len(output.seeds)
        length = output.prompt_embeds.shape[1]
        assert torch.equal(stacked["prompt_embeds"][rows, :length], output.prompt_embeds)
        assert stacked["prompt_embeds"][rows, length:].abs().sum() == 0
        if output.prompt_embeds_mask is not None:
            assert torch.equal(stacked["prompt_embeds_mask"][rows, :length], output.prompt_embeds_mask)
            assert not stacked["prompt_embeds_mask"][rows, length:].any()
    assert stacked["guidance"].tolist() == [output.guidance for output in outputs for _ in output.seeds]
    assert stack_outputs([]) == {}


@pytest.mark.parametrize("order", [0, 1])
def test_stacked_guided_and_unguided_rows_keep_their_negatives(adapter, make_request, order):
    guidance = {"guidance_scale": 3.0, "true_cfg_scale": 3.0}
    requests = [make_request(seed=1), make_request("b", "guided", "a long and blurry one", seed=2, **guidance)]
    outputs = ob.RolloutEngine(adapter).generate(requests[:: -1 if order else 1])
    stacked = stack_outputs(outputs)
    guided = next(row for row, output in enumerate(outputs) if output.request_id == "guided")
    assert stacked["guidance"].tolist() == [3.0 if row == guided else 1.0 for row in range(2)]
    for name, tensor in stacked.items():
        if name.startswith("negative_"):
            own = getattr(outputs[guided], name)[0]
            assert torch.equal(tensor[guided][: len(own)], own), name
            assert not tensor[1 - guided].any(), name
    assert "negative_prompt_embeds" in stacked


def test_outputs_of_failed_requests_are_named(adapter, make_request):
    outputs = ob.RolloutEngine(adapter).generate(
        [make_request(), make_request("x", "bad", seed=-1)], return_errors=True
    )
    for use in (stack_outputs, lambda outputs: training_fields(outputs[1])):
        with pytest.raises(
            ValueError, match=r"output 'bad' has nothing to train on: its request failed \(seed must be"
        ):
            use(outputs)
