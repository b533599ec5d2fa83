"""What each training algorithm reads, in every mode and for both models, against serial runs and the bare formulas."""

import pytest
import torch

import omnibatch as ob
from omnibatch.algorithms import ALGORITHMS, DEFAULT_SDE_TYPES, sde_arguments, training_fields
from omnibatch.replay import replay_log_probs

STEPS = 5
MODES = {
    "request": ob.RolloutConfig(max_num_seqs=8),
    "step": ob.RolloutConfig(step_execution=True, max_num_seqs=8),
    "fixed rows": ob.RolloutConfig(step_execution=True, max_num_seqs=8, rows_per_forward=4),
}
WINDOW = {"sde_window_size": 2, "sde_window_range": [0, 4]}
EXTRA_ARGS = {
    "flow_grpo": WINDOW,
    "mix_grpo random": WINDOW | {"sde_window_seed": 7, "global_steps": 3},
    "mix_grpo progressive": WINDOW | {"sde_window_strategy": "progressive", "global_steps": 5, "iters_per_group": 2},
    "dance_grpo": WINDOW | {"noise_level": 0.3},
    "diffusion_nft": {},
    "dpo": {},
}
# Beside the latents and log-probs, which every algorithm of its kind has.
EMBEDDINGS = ("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")


@pytest.fixture(params=EXTRA_ARGS)
def case(request):
    return request.param


@pytest.fixture
def algorithm(case):
    return case.split()[0]


@pytest.fixture
def trained(adapter, algorithm):
    """The adapter for an algorithm, over the same pipeline."""
    return type(adapter)(adapter.pipeline, algorithm)


@pytest.fixture
def requests(case, make_request):
    common = {"extra_args": EXTRA_ARGS[case], "num_inference_steps": STEPS}
    return [
        make_request("x", "plain", seed=1, num_outputs_per_prompt=2, **common),
        make_request("words " * 12, "guided", "ugly", seed=5, guidance_scale=3.0, true_cfg_scale=3.0, **common),
        make_request("a sign", "other", seed=9, **common),
    ]


def test_every_algorithm_has_a_case():
    assert {name.split()[0] for name in EXTRA_ARGS} == set(ALGORITHMS)


@pytest.mark.parametrize("mode", MODES)
def test_each_contract_in_each_mode(trained, algorithm, requests, mode, assert_same):
    outputs = ob.RolloutEngine(trained, MODES[mode]).generate(requests)
    fixed = MODES[mode].rows_per_forward
    serial = ob.RolloutEngine(trained, ob.RolloutConfig(rows_per_forward=fixed)).generate(requests)
    for output, expected in zip(outputs, serial):
        assert_same(output, expected, 0 if fixed else 1e-5)
        count, fields = len(output.seeds), training_fields(output, algorithm)
        assert set(EMBEDDINGS) <= set(fields)
        assert (fields["negative_prompt_embeds"] is not None) == (output.request_id == "guided")
        tensors = [value for name, value in fields.items() if value is not None and name not in EMBEDDINGS]
        assert all(value.device.type == "cpu" for value in tensors)
        if DEFAULT_SDE_TYPES[algorithm] is None:
            assert torch.equal(fields["latents_clean"], expected.latents) or not fixed
            assert fields["latents_clean"].dtype == torch.float32
            if algorithm == "diffusion_nft":
                assert torch.equal(fields["train_timesteps"], output.timesteps.expand(count, STEPS))
            assert output.trajectory_log_probs is None
        else:
            (start, end), latents = output.sde_window, fields["all_latents"]
            assert (latents.dtype, fields["all_log_probs"].dtype) == (torch.float32, torch.float32)
            assert latents.shape[:2] == (count, end - start + 1)
            assert fields["all_log_probs"].shape == (count, end - start)
            assert torch.equal(fields["all_timesteps"], output.timesteps[start:end].expand(count, -1))


@pytest.mark.parametrize("mode", MODES)
def test_stored_log_probs_are_the_densities_of_the_stored_steps(trained, algorithm, requests, mode):
    if DEFAULT_SDE_TYPES[algorithm] is None:
        return
    outputs = ob.RolloutEngine(trained, MODES[mode]).generate(requests)
    rows = MODES[mode].rows_per_forward
    for output, replayed in zip(outputs, replay_log_probs(trained, outputs, micro_batch_size=rows)):
        if rows:
            assert torch.equal(replayed, output.trajectory_log_probs)
        else:
            torch.testing.assert_close(replayed, output.trajectory_log_probs, atol=1e-5 * (2 * 3 - 1), rtol=0)


def test_mix_grpo_gives_every_request_the_training_steps_window(adapter, make_request):
    mix = type(adapter)(adapter.pipeline, "mix_grpo")
    for name in ("mix_grpo random", "mix_grpo progressive"):
        requests = [
            make_request(f"prompt {i}", str(i), seed=i, num_inference_steps=STEPS, extra_args=EXTRA_ARGS[name])
            for i in range(4)
        ]
        outputs = ob.RolloutEngine(mix, MODES["step"]).generate(requests)
        windows = {output.sde_window for output in outputs}
        assert windows == {sde_arguments(EXTRA_ARGS[name], STEPS, algorithm="mix_grpo", seed=99).window}
        # Five training steps of two each: the third place of the three that a window of 2 has within [0, 4].
        assert name == "mix_grpo random" or windows == {(2, 4)}
