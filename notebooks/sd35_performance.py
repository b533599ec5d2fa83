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
# # Performance: Stable Diffusion 3.5
#
# The rollouts of one training step of the SD3.5-Medium FlowGRPO recipe: 8 prompts with 8 images each, 384 x 384 pixels, 10
# steps, no guidance, a LoRA of rank 32. `omnibatch bench --recipe sd35_flow_grpo` does the same from a shell.
#
# On a GPU the cells below run the full-size architecture with random weights, which take as long as the real ones, at
# the recipe's own shapes. Without one they run the same workload on the embedded model of the family: that shows that
# all of it works, and how the modes compare on this machine, not what a GPU does.

# %%
from pathlib import Path

import pandas as pd
import torch

from omnibatch.bench.command import ROUNDS, workload_of
from omnibatch.bench.recipe_table import RecipeTable, measure_recipe
from omnibatch.recipes import find_recipe

RECIPE = "sd35_flow_grpo"
on_gpu = torch.cuda.is_available()
device, scale = ("cuda", "full") if on_gpu else ("cpu", "tiny")

# %% [markdown]
# The recipe, and what of it is run here (`scale` may also be `"minutes"`: the same shapes with fewer prompts).

# %% tags=["nbval-ignore-output"]
adapter, workload, make_requests = workload_of(find_recipe(RECIPE), scale, device)
shown = [
    "model",
    "num_prompts",
    "images_per_prompt",
    "size",
    "num_inference_steps",
    "guidance_scale",
]
shown += ["max_sequence_length", "noise_level", "sde_type", "sde_window_size"]
pd.DataFrame(
    {
        "full size": {name: getattr(find_recipe(RECIPE), name) for name in shown},
        "run here": {name: getattr(workload, name) for name in shown},
    }
)

# %% [markdown]
# ## Measured here
#
# Every way of running takes its turn in each round; the first round does not count. "In transformer" is the share of the
# time within the transformer's forward. "Of the limit" is the floor over the gen time: the forwards' floating-point
# operations, over the rate that this device reaches on one large matrix product.

# %% tags=["nbval-ignore-output"]
table = measure_recipe(
    adapter,
    workload,
    make_requests,
    scale=scale,
    random_weights=on_gpu,
    repeats=ROUNDS[scale],
)
table

# %% tags=["nbval-ignore-output"]
table.plot()

# %%
serial = table.table().set_index("run").loc["serial"]
assert serial["speed-up"] == 1
assert len(table.rows) == 6
assert all(len(row.seconds) == ROUNDS[scale] for row in table.rows)

# %% [markdown]
# ## Recorded on GPUs
#
# Results that this code gave on a GPU are kept in `results/`, each with its device and date.

# %%
recorded = [
    RecipeTable.read(path) for path in sorted(Path("results").glob(f"{RECIPE}-*.json"))
]
for result in recorded:
    print(result.markdown())
if not recorded:
    print("No GPU result has been recorded yet.")

# %% [markdown]
# ## Published
#
# These times were published for this recipe, with FlashAttention-3 and without the number of devices, so only their
# ratio can be compared. Step-wise was not published for this model.

# %%
published = pd.DataFrame(
    [("serial", 1, 25.4), ("request-level", 256, 22.3)],
    columns=["mode", "max_num_seqs", "published gen time (s)"],
).set_index("mode")
published["to serial"] = (
    published["published gen time (s)"]
    / published.loc["serial", "published gen time (s)"]
).round(2)
published
