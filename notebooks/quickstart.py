# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart
#
# Five minutes with `omnibatch`: pictures, trajectories and log-probs from a small model, batched; which mode to take;
# and the first ratio of a policy update, which is exactly 1. It runs on a CPU.

# %%
import pandas as pd
import torch

import omnibatch as ob
from omnibatch.bench.compare import compare
from omnibatch.measure import measure
from omnibatch.replay import replay_log_probs, stack_outputs
from omnibatch.timeline import Timeline

# %% [markdown]
# ## A model, an engine, a request
#
# `load` takes the name of an embedded model, a diffusers folder, a hub id, or a pipeline that you hold; its modules are
# shared, not copied. The configuration says how requests are packed: here step-wise, up to eight in flight.

# %%
adapter = ob.load("tiny-qwen-image", device="cpu", dtype=torch.float32)
config = ob.RolloutConfig(step_execution=True, max_num_seqs=8, rows_per_forward=16)
config

# %% tags=["nbval-ignore-output"]
engine = ob.RolloutEngine(adapter, config)
sampling = ob.OmniDiffusionSamplingParams(
    seed=1, num_inference_steps=10, num_outputs_per_prompt=4
)
(output,) = engine.generate(
    [ob.OmniDiffusionRequest('a red sign that says "42"', sampling, "forty-two")]
)
output

# %% [markdown]
# An output is its pictures and everything that training reads. Noise comes from one generator for each picture, seeded
# with the request's seed plus the picture's place, so any picture can be made again alone.

# %%
{
    "pictures": tuple(output.output.shape),
    "latents before and after each SDE step": tuple(output.trajectory_latents.shape),
    "log-probs": tuple(output.trajectory_log_probs.shape),
    "seeds": output.seeds,
    "steps": output.num_steps,
}

# %% [markdown]
# ## Requests of many kinds in one forward
#
# Steps, guidance, samplers, noise, windows, prompt lengths and numbers of outputs may differ. A request that is wrong
# fails alone.

# %% tags=["nbval-ignore-output"]
Sampling = ob.OmniDiffusionSamplingParams
mixed = [
    ob.OmniDiffusionRequest(
        'a sign that says "7"', Sampling(seed=10, num_inference_steps=6), "short"
    ),
    ob.OmniDiffusionRequest(
        {"prompt": 'a blue sign that says "123"', "negative_prompt": "a red sign"},
        Sampling(
            seed=20,
            num_inference_steps=10,
            true_cfg_scale=3.0,
            num_outputs_per_prompt=2,
        ),
        "guided",
    ),
    ob.OmniDiffusionRequest(
        'a green sign that says "58"',
        Sampling(
            seed=30,
            num_inference_steps=8,
            extra_args={"sde_type": "cps", "sde_window_size": 2},
        ),
        "two SDE steps",
    ),
    ob.OmniDiffusionRequest("a sign", Sampling(height=100), "wrong"),
]
timeline = Timeline()
outputs = ob.RolloutEngine(adapter, config, timeline=timeline).generate(
    mixed, return_errors=True
)
print(outputs[-1].error)
timeline

# %% tags=["nbval-ignore-output"]
outputs[1]

# %% [markdown]
# ## Which mode?
#
# All modes give the same result. `compare` shows them side by side, `measure` tries capacities on your own requests and
# picks. (What these tables say holds for the machine that ran them.)


# %% tags=["nbval-ignore-output"]
def make_requests():
    sampling = [
        Sampling(seed=100 * place, num_inference_steps=10) for place in range(16)
    ]
    return [
        ob.OmniDiffusionRequest(f'a sign that says "{place}"', params)
        for place, params in enumerate(sampling)
    ]


comparison = compare(adapter, make_requests, max_num_seqs=16)
comparison

# %% tags=["nbval-ignore-output"]
choice = measure(adapter, make_requests(), capacities=(4, 16), repeats=1)
print(choice.reason)
choice

# %% [markdown]
# ## In training
#
# `replay_log_probs` recomputes the log-probs of stored steps, with gradients, through the same transformer. With as
# many rows per call as the rollout had, they are equal to the bit: the first ratio is exactly 1.

# %%
outputs = engine.generate(make_requests())
log_probs = replay_log_probs(adapter, outputs, micro_batch_size=16, requires_grad=True)
ratios = torch.cat(
    [
        (new - output.trajectory_log_probs).exp()
        for new, output in zip(log_probs, outputs)
    ]
)
assert (ratios == 1).all()
ratios.shape

# %% [markdown]
# `stack_outputs` gives a trainer's tensors, a row a picture:

# %%
pd.Series(
    {name: str(list(tensor.shape)) for name, tensor in stack_outputs(outputs).items()},
    name="shape",
).to_frame()

# %% [markdown]
# From here: [which mode to take](../book/which_mode.md), [what exactness is worth](../book/exactness.md),
# [training with it](../book/training.md), [a model of your own](../book/new_model_step_wise.md).
