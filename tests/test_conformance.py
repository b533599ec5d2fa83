"""The check passes sound adapters, and names each of many ways to be unsound."""

import pytest
import torch
from fake_adapter import FakeAdapter, PackedForward

from omnibatch import OmniDiffusionSamplingParams, tiny
from omnibatch.adapters import check, load
from omnibatch.adapters.qwen_image import QwenImageAdapter

SAMPLING = OmniDiffusionSamplingParams(num_inference_steps=3, max_sequence_length=32)


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
@pytest.mark.parametrize("name", tiny.MODEL_NAMES)
def test_the_packages_own_adapters_pass(adapters, name, algorithm):
    adapter = adapters[name]
    found = check(type(adapter)(adapter.pipeline, algorithm), sampling=SAMPLING)
    assert found.passed
    assert len(found.findings) == (14 if algorithm == "flow_grpo" else 12)


def test_bfloat16_is_checked_with_fixed_rows_only():
    found = check(load("tiny-qwen-image", device="cpu", dtype=torch.bfloat16), sampling=SAMPLING)
    assert found.passed
    assert "step equals serial" not in [finding.name for finding in found.findings]


class SharedStream(QwenImageAdapter):
    """Draws every request's latents from one generator."""

    generator = torch.Generator().manual_seed(0)

    def draw_latents(self, height, width, generator):
        return super().draw_latents(height, width, self.generator)


class NeighboursMatter(QwenImageAdapter):
    """Adds a little of the other rows to each."""

    def predict_velocity(self, latents, timesteps, rows, image_size):
        velocity = super().predict_velocity(latents, timesteps, rows, image_size)
        return velocity + 1e-3 * velocity.mean(dim=0, keepdim=True)


class MovesStates(QwenImageAdapter):
    """Writes into a state while it only ought to predict."""

    def denoise_step(self, input_batch):
        for state in input_batch.states:
            state.latents = state.latents * 1.001
        return super().denoise_step(input_batch)


class GuidesEverything(QwenImageAdapter):
    """Encodes a negative prompt for requests that are not guided."""

    def guidance_scale(self, request):
        return 3.0


class Detached(QwenImageAdapter):
    """Lets no gradient through."""

    def predict_velocity(self, latents, timesteps, rows, image_size):
        return super().predict_velocity(latents, timesteps, rows, image_size).detach()


class RoundsTrajectories(QwenImageAdapter):
    """Keeps its latents in bfloat16, so that stored log-probs are not those of the stored steps."""

    def step_scheduler(self, input_batch, noise_pred):
        super().step_scheduler(input_batch, noise_pred)
        for state in input_batch.states:
            state.trajectory_latents = [latents.bfloat16().float() for latents in state.trajectory_latents]


class FloatPictures(QwenImageAdapter):
    """Returns pictures from 0 to 1."""

    def post_decode(self, states, decode_rows=1):
        super().post_decode(states, decode_rows)
        for state in states:
            state.images = state.images / 255


@pytest.mark.parametrize(
    ("unsound", "named"),
    [
        (SharedStream, "a seed gives the same bits again"),
        (NeighboursMatter, "step equals serial"),
        (NeighboursMatter, "step with fixed rows equals serial to the bit"),
        (MovesStates, "denoise_step can be repeated and changes no state"),
        (GuidesEverything, "the fields that flow_grpo reads are there"),
        (Detached, "gradients reach the transformer"),
        (RoundsTrajectories, "replayed log-probs equal the rollout's to the bit"),
        (FloatPictures, "every request ends with pictures"),
    ],
)
def test_what_is_wrong_is_named(adapters, unsound, named):
    found = check(unsound(adapters["tiny-qwen-image"].pipeline), sampling=SAMPLING)
    assert not found.passed
    assert dict(found.findings)[named] != ""
    assert f"FAILED  {named}: " in repr(found)
    assert named in found.table().query("result != 'passed'")["check"].tolist()
    assert "failed: " in found._repr_html_()


def test_a_lifecycle_without_the_base_class_is_checked_in_every_mode():
    found = check(FakeAdapter())
    assert [
        finding for finding in found.findings if finding.fault and finding.name != "a bad request fails alone"
    ] == []
    assert "step with fixed rows equals serial to the bit" in [finding.name for finding in found.findings]
    # It takes any prompt, an empty one as well.
    assert "'no prompt' must end with a ValueError" in dict(found.findings)["a bad request fails alone"]


def test_a_forward_alone_is_checked_in_the_modes_it_supports():
    found = check(PackedForward())
    names = [finding.name for finding in found.findings]
    assert "request equals serial" in names
    assert not any("step" in name or "fixed rows" in name for name in names)
    # It makes one picture a request, whatever was asked for.
    assert dict(found.findings)["every request ends with pictures"] != ""
