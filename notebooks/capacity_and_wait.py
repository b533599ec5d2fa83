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
# # Capacity and wait
#
# Which numbers to give to the knobs: how the time of a step grows with its rows, what `max_num_seqs` and
# `rows_per_forward` change, whether `request_batch_max_wait_ms` matters, and what happens when requests arrive over time.
# On a GPU the cells run the full-size architectures with random weights; without one, the embedded models.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

import omnibatch as ob
from omnibatch.bench.arrivals import measure as measure_arrivals
from omnibatch.bench.command import workload_of
from omnibatch.bench.sweeps import sweep_configs, sweep_rows
from omnibatch.recipes import RECIPES

on_gpu = torch.cuda.is_available()
device, scale = ("cuda", "minutes") if on_gpu else ("cpu", "tiny")
print("full-size architectures, random weights" if on_gpu else "embedded models")

# %% [markdown]
# ## Rows of a call
#
# Of the rows that a step has anyway, how many should share a call? The time of a row falls as long as a call is bound by
# its launch and by reading the weights, and stays where the arithmetic takes over. (Guided rows count twice: they bring
# their negative prompt.)

# %% tags=["nbval-ignore-output"]
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
sweeps = {}
for recipe in RECIPES.values():
    adapter, workload, make_requests = workload_of(recipe, scale, device)
    sweeps[recipe.name] = sweep = sweep_rows(adapter, make_requests(0)[0])
    axes.plot(
        sweep["rows"],
        sweep["ms a row"] / sweep["ms a row"].iloc[0],
        "o-",
        label=recipe.name,
    )
axes.set_xscale("log", base=2)
axes.set_xticks(sweep["rows"], sweep["rows"])
axes.set(
    xlabel="rows of a step", ylabel="time a row, of that with 1 row", ylim=(0, None)
)
axes.legend()
plt.show()

# %% tags=["nbval-ignore-output"]
pd.concat(sweeps, names=["recipe"]).droplevel(1).round(3)

# %% [markdown]
# ## Requests at a time, and fixed rows
#
# `max_num_seqs` is how many requests are in flight or in a wave, `rows_per_forward` how many rows a call takes.


# %% tags=["nbval-ignore-output"]
def capacity_configs(capacities=(1, 4, 16, 64)):
    for capacity in capacities:
        yield f"request-level, {capacity}", ob.RolloutConfig(max_num_seqs=capacity)
        yield (
            f"step-wise, {capacity}",
            ob.RolloutConfig(step_execution=True, max_num_seqs=capacity),
        )
    for rows in (8, 16, 32):
        config = ob.RolloutConfig(
            step_execution=True, max_num_seqs=64, rows_per_forward=rows
        )
        yield f"step-wise, 64, {rows} rows a call", config


adapter, workload, make_requests = workload_of(
    RECIPES["qwen_image_flow_grpo"], scale, device
)
capacities = sweep_configs(adapter, make_requests, dict(capacity_configs()), repeats=2)
capacities.round(3)

# %% [markdown]
# ## The admission wait
#
# In a training step all requests come in one burst. The wait then ends when the wave is full, or after 20 ms
# without another, so it hardly shows.

# %% tags=["nbval-ignore-output"]
waits = {
    f"{wait} ms": ob.RolloutConfig(max_num_seqs=64, request_batch_max_wait_ms=wait)
    for wait in (0, 10, 50)
}
sweep_configs(adapter, make_requests, waits).round(3)

# %% [markdown]
# ## Requests that arrive over time
#
# Poisson arrivals of requests with 10 or 50 steps, at 70 % of the rate that step-wise can work off, eight at a time. A
# wave makes short requests wait for long ones; step by step they leave when they are done. (On the embedded model: this
# is about the order of things, not about the device.)

# %% tags=["nbval-ignore-output"]
arrivals = measure_arrivals(
    ob.load("tiny-qwen-image", device="cpu"), count=40, progress=False
)
arrivals

# %%
assert set(sweeps) == set(RECIPES)
assert capacities["configuration"].tolist() == [name for name, _ in capacity_configs()]
assert arrivals["mode"].tolist() == ["step", "request"]
