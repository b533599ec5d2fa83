"""What an algorithm reads from a request and hands to training."""

import pytest
import torch

from omnibatch import DiffusionOutput
from omnibatch.algorithms import sde_arguments, training_fields, validate_algorithm


def test_defaults():
    arguments = sde_arguments({}, num_timesteps=10, seed=0)
    assert (arguments.noise_level, arguments.sde_type, arguments.window, arguments.logprobs) == (
        0.7,
        "sde",
        (0, 9),
        True,
    )


@pytest.mark.parametrize("text", ["[0,5]", "(0, 5)", [0, 5], (0, 5)])
def test_a_range_may_be_a_string(text):
    windows = {sde_arguments({"sde_window_size": 2, "sde_window_range": text}, 10, seed).window for seed in range(60)}
    assert windows == {(0, 2), (1, 3), (2, 4), (3, 5)}


def test_the_same_seed_draws_the_same_window():
    extra_args = {"sde_window_size": 2, "sde_window_range": [0, 8]}
    assert sde_arguments(extra_args, 10, 3) == sde_arguments(extra_args, 10, 3)


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
        ({"noise_levle": 1}, "noise_levle"),
    ],
)
def test_bad_arguments_are_named(extra_args, named):
    with pytest.raises(ValueError, match=named):
        sde_arguments(extra_args, num_timesteps=10, seed=0)


def test_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="'ppo'"):
        validate_algorithm("ppo")


def test_training_fields_keep_the_negative_keys():
    fields = training_fields(DiffusionOutput("a", trajectory_latents=torch.zeros(1)))
    assert fields["negative_prompt_embeds"] is None
    assert fields["negative_prompt_embeds_mask"] is None
    assert "pooled_prompt_embeds" not in fields
