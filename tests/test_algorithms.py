"""What an algorithm reads from a request and hands to training."""

import pytest
import torch

from omnibatch import DiffusionOutput
from omnibatch.algorithms import sde_arguments, training_fields, validate_algorithm


def test_defaults():
    arguments = sde_arguments({}, num_timesteps=10)
    assert (arguments.noise_level, arguments.sde_type, arguments.window, arguments.logprobs) == (
        0.7,
        "sde",
        (0, 9),
        True,
    )


@pytest.mark.parametrize("text", ["[0,5]", "(0, 5)", [0, 5], (0, 5)])
def test_a_range_may_be_a_string(text):
    windows = {
        sde_arguments({"sde_window_size": 2, "sde_window_range": text}, 10, seed=seed).window for seed in range(60)
    }
    assert windows == {(0, 2), (1, 3), (2, 4), (3, 5)}


def test_the_same_seed_draws_the_same_window():
    extra_args = {"sde_window_size": 2, "sde_window_range": [0, 8]}
    assert sde_arguments(extra_args, 10, seed=3) == sde_arguments(extra_args, 10, seed=3)


def test_a_window_may_be_shared_by_a_group_or_by_all():
    def windows(scope, **seeds):
        extra_args = {"sde_window_size": 1, "sde_window_range": [0, 64], "sde_window_scope": scope} | seeds
        return [sde_arguments(extra_args, 64, seed=s, group_seed=g).window for s in range(4) for g in (5, 6)]

    assert len(set(windows("request"))) > 2
    assert windows("request")[0] == windows("request")[1]
    by_group = windows("group")
    assert set(by_group[::2]) == {by_group[0]}
    assert set(by_group[1::2]) == {by_group[1]}
    assert by_group[0] != by_group[1]
    assert len(set(windows("all"))) == 1
    assert windows("all", sde_window_seed=1) != windows("all", sde_window_seed=2)


MIX = {"sde_window_size": 2, "sde_window_range": [0, 6]}


def mix_window(step, seed=0, **extra_args):
    arguments = {"global_steps": step} | MIX | extra_args
    return sde_arguments(arguments, 10, algorithm="mix_grpo", seed=seed, group_seed=seed).window


def test_mix_grpo_draws_one_window_a_training_step_for_all_ranks():
    windows = [mix_window(step, sde_window_seed=7) for step in range(40)]
    assert windows == [mix_window(step, seed=99, sde_window_seed=7) for step in range(40)]
    assert set(windows) == {(start, start + 2) for start in range(5)}
    assert mix_window(3, sde_window_seed=7) == mix_window(10, sde_window_seed=0)


def test_mix_grpo_may_move_its_window_progressively():
    moving = {"sde_window_strategy": "progressive", "iters_per_group": 3}
    starts = [mix_window(step, **moving)[0] for step in range(18)]
    assert starts == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [0] * 3


@pytest.mark.parametrize(
    ("extra_args", "named"),
    [
        ({"sde_window_strategy": "sideways"}, "sde_window_strategy.*'sideways'"),
        ({"global_steps": -1}, "global_steps.*-1"),
        ({"iters_per_group": 0}, "iters_per_group.*0"),
    ],
)
def test_bad_mix_grpo_arguments_are_named(extra_args, named):
    with pytest.raises(ValueError, match=named):
        sde_arguments(MIX | extra_args, 10, algorithm="mix_grpo")
    with pytest.raises(ValueError, match=r"has no field .* for flow_grpo"):
        sde_arguments(extra_args, 10)


@pytest.mark.parametrize(
    ("algorithm", "sampler"), [("flow_grpo", "sde"), ("mix_grpo", "sde"), ("dance_grpo", "dance_sde")]
)
def test_each_algorithm_has_its_sampler(algorithm, sampler):
    assert sde_arguments({}, 10, algorithm=algorithm).sde_type == sampler


@pytest.mark.parametrize(
    ("extra_args", "named"),
    [
        ({"sde_window_range": "[0,5"}, r"sde_window_range.*'\[0,5'"),
        ({"sde_window_range": [0, 11]}, r"sde_window_range.*\[0, 11\]"),
        ({"sde_window_range": [5, 5]}, "sde_window_range"),
        ({"sde_window_range": [-1, 5]}, "sde_window_range"),
        ({"sde_window_range": [0, 2, 5]}, "sde_window_range"),
        ({"sde_window_range": 5}, "sde_window_range"),
        ({"sde_window_range": [0.0, 5.0]}, "sde_window_range"),
        ({"sde_window_size": 6, "sde_window_range": [0, 5]}, "sde_window_size.*6"),
        ({"sde_window_size": 0}, "sde_window_size.*0"),
        ({"sde_type": "foo"}, "sde_type.*'foo'"),
        ({"noise_level": -1}, "noise_level.*-1"),
        ({"noise_level": "high"}, "noise_level.*'high'"),
        ({"logprobs": 1}, "logprobs"),
        ({"sde_window_scope": "batch"}, "sde_window_scope.*'batch'"),
        ({"sde_window_seed": -1}, "sde_window_seed.*-1"),
        ({"noise_levle": 1}, "noise_levle"),
    ],
)
def test_bad_arguments_are_named(extra_args, named):
    with pytest.raises(ValueError, match=named):
        sde_arguments(extra_args, num_timesteps=10)


def test_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="'ppo'"):
        validate_algorithm("ppo")


def test_training_fields_keep_the_negative_keys():
    fields = training_fields(DiffusionOutput("a", trajectory_latents=torch.zeros(1)))
    assert fields["negative_prompt_embeds"] is None
    assert fields["negative_prompt_embeds_mask"] is None
    assert "pooled_prompt_embeds" not in fields
