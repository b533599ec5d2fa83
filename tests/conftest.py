"""Models and requests that several test modules share."""

import logging

import pytest
import torch

import omnibatch as ob
from omnibatch import tiny


@pytest.fixture(scope="session")
def adapters():
    """Both embedded models in float32, loaded once."""
    return {name: ob.load(name, device="cpu", dtype=torch.float32) for name in tiny.MODEL_NAMES}


@pytest.fixture(params=tiny.MODEL_NAMES)
def adapter(request, adapters):
    return adapters[request.param]


@pytest.fixture
def make_request():
    """A function that makes a request with short text, so that tests stay quick."""

    def make(prompt='a sign that says "42"', request_id="request", negative_prompt=None, **sampling):
        arguments = {"seed": 0, "num_inference_steps": 4, "guidance_scale": 1.0, "max_sequence_length": 48}
        if negative_prompt is not None:
            prompt = {"prompt": prompt, "negative_prompt": negative_prompt}
        return ob.OmniDiffusionRequest(prompt, ob.OmniDiffusionSamplingParams(**(arguments | sampling)), request_id)

    return make


TENSOR_FIELDS = ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps", "timesteps", "sigmas", "latents")


@pytest.fixture
def assert_same():
    """A function that compares two outputs of one request, to a tolerance or to the bit.

    Kernels round a row differently in another batch shape, and guidance of scale g multiplies what two branches lose by
    up to g + (g - 1); so the tolerance of guided requests grows by that. Where shapes are fixed, it is 0.
    """

    def compare(output, expected, tolerance=1e-5):
        assert output.request_id == expected.request_id
        assert output.error is None
        assert output.sde_window == expected.sde_window
        assert output.seeds == expected.seeds
        tolerance *= 2 * max(expected.guidance, 1.0) - 1
        for name in TENSOR_FIELDS:
            ours, theirs = getattr(output, name), getattr(expected, name)
            assert (ours is None) == (theirs is None), name
            if ours is None:
                continue
            if tolerance == 0:
                assert torch.equal(ours, theirs), name
            else:
                torch.testing.assert_close(
                    ours, theirs, atol=tolerance, rtol=0, msg=lambda text, name=name: name + text
                )
        if output.output.dtype == torch.uint8:
            # A latent that differs in its last bits may move a pixel by one step of 255.
            assert (output.output.int() - expected.output.int()).abs().max() <= (0 if tolerance == 0 else 1)

    return compare


@pytest.fixture(scope="module")
def local_ray():
    """A Ray of this test module, with more places than cores."""
    import fake_adapter
    import fake_ray_adapters
    import ray

    for module in (fake_adapter, fake_ray_adapters):
        ray.cloudpickle.register_pickle_by_value(module)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def engine_like_replicas():
    """An engine over tiny-sd35 with one thread, as replicas have: a kernel may round differently with more."""
    from ray_helpers import CONFIG

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ob.RolloutEngine(ob.load("tiny-sd35", device="cpu", dtype=torch.float32), CONFIG)
    torch.set_num_threads(threads)
