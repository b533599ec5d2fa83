"""Requests for pools, comparisons, and a look at the replicas' processes."""

import os

import psutil
import ray
import torch

import omnibatch as ob
from omnibatch.prompt_files import make_requests
from omnibatch.tiny import EXAMPLE_PROMPTS

CONFIG = ob.RolloutConfig(step_execution=True, max_num_seqs=8, rows_per_forward=4)


def mixed_requests(seed=0, prompts=3, images=4):
    """Requests that differ in everything that may differ within a forward."""
    requests = []
    for place, prompt in enumerate(EXAMPLE_PROMPTS[:prompts]):
        sampling = ob.OmniDiffusionSamplingParams(
            num_inference_steps=3 + place % 3,
            guidance_scale=1.0 + place % 2,
            max_sequence_length=48,
            num_outputs_per_prompt=1 + place % 2,
            extra_args={"noise_level": 0.5 + 0.1 * place},
        )
        requests += make_requests([prompt], sampling, images_per_prompt=images, seed=100 * seed + 10 * place)
    return [ob.OmniDiffusionRequest(r.prompt, r.sampling_params, f"{place}") for place, r in enumerate(requests)]


def fake_requests(prompts, steps=4):
    sampling = [ob.OmniDiffusionSamplingParams(num_inference_steps=steps, seed=seed) for seed in range(len(prompts))]
    return [ob.OmniDiffusionRequest(*pair, f"{place}") for place, pair in enumerate(zip(prompts, sampling))]


def assert_same(outputs, expected):
    assert [output.request_id for output in outputs] == [output.request_id for output in expected]
    for output, reference in zip(outputs, expected):
        assert output.error is None, output.error
        assert output.seeds == reference.seeds
        for name, value in vars(reference).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(output, name), value), name


def replica_pids(pool=None):
    """Processes of a pool's replicas that take requests, or of all replicas of this machine, oldest first."""
    if pool is not None:
        replicas = [pool._coordinator._replicas[name] for name in list(pool._coordinator._assignment.replicas)]
        return sorted(ray.get([replica.actor.__ray_call__.remote(lambda _: os.getpid()) for replica in replicas]))
    processes = psutil.process_iter(["pid", "cmdline"])
    return sorted(p.info["pid"] for p in processes if " ".join(p.info["cmdline"] or []).startswith("ray::Replica"))


def resident_bytes(pool):
    """Memory of this process and of a pool's replicas."""
    return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *replica_pids(pool))]
