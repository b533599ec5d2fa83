"""The sampler against the papers' formulas, written out in float64."""

import math

import pytest
import torch

from omnibatch.sde import SDE_TYPES, sample_step, schedule_coefficients, step_coefficients

SIGMAS = (1.0, 0.93, 0.71, 0.4, 0.15, 0.02, 0.0)
SHAPE = (16, 64)


def reference_step(x, v, s, s_next, first, a, sde_type, noise):
    """One row of one step in float64: mean, next sample and log-prob, as the papers write them."""
    dt = s_next - s
    if sde_type == "sde":
        std = a * math.sqrt(s / (1 - (first if s == 1 else s)))
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        scale = std * math.sqrt(-dt)
    elif sde_type == "dance_sde":
        score = -(x - (1 - s) * (x - s * v)) / s**2
        mean = x + dt * v + (-(a**2) / 2 * score) * dt
        scale = a * math.sqrt(-dt)
    else:
        scale = s_next * math.sin(a * math.pi / 2)
        clean, noisy = x - s * v, x + (1 - s) * v
        mean = clean * (1 - s_next) + noisy * math.sqrt(s_next**2 - scale**2)
    after = mean + scale * noise
    if sde_type == "cps":
        return mean, after, -((after - mean) ** 2).mean()
    return mean, after, torch.distributions.Normal(mean, scale).log_prob(after).mean()


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(3)]


# The last cps step is deterministic and has no density: see test_last_step_is_finite.
@pytest.mark.parametrize(
    ("sde_type", "index"), [(kind, i) for kind in SDE_TYPES for i in range(6) if (kind, i) != ("cps", 5)]
)
@pytest.mark.parametrize("noise_level", [0.3, 0.8, 1.0])
def test_step_and_log_prob_match_the_formula(sde_type, index, noise_level):
    x, v, noise = rows()
    s, s_next = SIGMAS[index], SIGMAS[index + 1]
    expected = reference_step(x, v, s, s_next, SIGMAS[1], noise_level, sde_type, noise)
    table = schedule_coefficients(SIGMAS, (0, 6), noise_level=noise_level, sde_type=sde_type)
    step = sample_step(x[None].float(), v[None].float(), table[index][None], noise=noise[None].float())
    for ours, theirs in zip((step.mean[0], step.next_sample[0]), expected):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(step.log_prob[0].double(), expected[2], atol=2e-6, rtol=2e-6)


def test_without_noise_it_is_the_euler_step():
    x, v, _ = (row[None].float() for row in rows())
    table = schedule_coefficients(SIGMAS, (0, 6), noise_level=0.0, sde_type="sde")
    for index in range(6):
        expected = x + (SIGMAS[index + 1] - SIGMAS[index]) * v
        torch.testing.assert_close(sample_step(x, v, table[index][None]).next_sample, expected, atol=1e-6, rtol=1e-6)


def test_outside_the_window_steps_are_deterministic():
    table = schedule_coefficients(SIGMAS, (2, 4), noise_level=0.7, sde_type="sde")
    assert (table[:, 2] > 0).tolist() == [False, False, True, True, False, False]


def test_rows_do_not_depend_on_their_neighbours():
    """Rows of different steps, noise levels and samplers in one call give each row's own bits."""
    tables = [
        schedule_coefficients(SIGMAS, window, noise_level=level, sde_type=kind)
        for window, level, kind in [
            ((0, 3), 0.7, "sde"),
            ((1, 2), 0.4, "cps"),
            ((0, 6), 0.9, "dance_sde"),
            ((0, 0), 0, "sde"),
        ]
    ]
    coefficients = torch.stack([table[index] for table, index in zip(tables, (2, 1, 5, 3))])
    x, v, noise = (torch.stack([rows(seed)[part] for seed in range(4)]).float() for part in range(3))
    together = sample_step(x, v, coefficients, noise=noise)
    for row in range(4):
        one = slice(row, row + 1)
        alone = sample_step(x[one], v[one], coefficients[one], noise=noise[one])
        for ours, theirs in zip(together, alone):
            assert torch.equal(ours[one], theirs)


def test_a_known_next_sample_is_scored_to_the_bit():
    x, v, noise = (row[None].float() for row in rows())
    table = schedule_coefficients(SIGMAS, (0, 6), noise_level=0.7, sde_type="sde")
    drawn = sample_step(x, v, table[2][None], noise=noise)
    scored = sample_step(x, v, table[2][None], next_sample=drawn.next_sample)
    assert torch.equal(scored.log_prob, drawn.log_prob)
    assert torch.equal(scored.mean, drawn.mean)


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("sigmas", [SIGMAS, (1.0, 0.0)])
def test_last_step_is_finite(sde_type, sigmas):
    x, v, noise = (row[None].float() for row in rows())
    table = schedule_coefficients(sigmas, (0, len(sigmas) - 1), noise_level=0.7, sde_type=sde_type)
    step = sample_step(x, v, table[-1][None], noise=noise)
    assert all(torch.isfinite(part).all() for part in step)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sde_type": "foo"}, "sde_type.*'foo'"),
        ({"noise_level": -0.1}, "noise_level.*-0.1"),
        ({"noise_level": float("inf")}, "noise_level"),
        ({"next_sigma": 0.6}, "sigmas"),
        ({"sigma": 1.2}, "sigmas"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        step_coefficients(**({"sigma": 0.5, "next_sigma": 0.25, "noise_level": 0.7} | arguments))
