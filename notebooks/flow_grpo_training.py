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
# # Train with it: FlowGRPO on a small model
#
# A whole FlowGRPO run (arXiv 2505.05470): rollouts by `omnibatch`, a reward that reads the text on each picture,
# a clipped policy loss over replayed log-probs, and a LoRA that learns. The model is the embedded `tiny-qwen-image`, so
# one run takes less than two minutes on two CPU cores; with another name in `MODEL` the same code trains another model.
#
# The policy starts well below its ceiling: three denoising steps with strong noise smear the three digits on its signs.
# It learns to draw signs that can be read all the same. A group's pictures start from the same noise (`shared_noise`),
# as in DanceGRPO (arXiv 2505.07818): what their rewards differ by is then due to the steps that are trained.
#
# As a script: `python notebooks/flow_grpo_training.py`.

# %%
import time

import matplotlib.pyplot as plt
import pandas as pd
import torch
from peft import LoraConfig
from tqdm import tqdm

import omnibatch as ob
from omnibatch.recipes import QWEN_IMAGE_FLOW_GRPO
from omnibatch.replay import replay_log_probs
from omnibatch.tiny.reward import text_reward
from omnibatch.tiny.signs import sample_texts, sign_prompt

MODEL = "tiny-qwen-image"
PROMPTS, GROUP = 4, 16  # prompts a training step, pictures a prompt
ITERATIONS, SEEDS = 80, (0, 1, 2)
LEARNING_RATE, CLIP_RANGE, EPOCHS = (
    3e-4,
    2e-3,
    2,
)  # two optimizer steps on each batch of rollouts
ROLLOUT = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 3,
    "true_cfg_scale": 1.0,
    "max_sequence_length": 32,
    "extra_args": {"noise_level": 1.0, "shared_noise": True},
}
STEP_WISE = ob.RolloutConfig(
    step_execution=True, max_num_seqs=PROMPTS, rows_per_forward=GROUP
)

# %% [markdown]
# ## The policy and the prompts
#
# The LoRA takes the layers of the full-size recipe. Texts for the measurement are held out: no step of these runs sees
# them.


# %%
def make_policy(seed: int) -> ob.RolloutAdapter:
    """The model with a fresh LoRA, the only weights that are trained."""
    torch.manual_seed(seed)
    policy = ob.load(MODEL, device="cpu", dtype=torch.float32)
    policy.transformer.requires_grad_(False)
    targets = list(QWEN_IMAGE_FLOW_GRPO.lora.target_modules)
    policy.transformer.add_adapter(
        LoraConfig(
            r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=targets
        )
    )
    return policy


def three_digits(count: int, seed: int) -> list[str]:
    """Texts of three digits."""
    return [text for text in sample_texts(4 * count, seed) if len(text) == 3][:count]


HELD_OUT = sorted(set(three_digits(32, seed=1_000)))


def training_texts(seed: int, iterations: int) -> list[list[str]]:
    """Texts of each training step."""
    texts = [
        text
        for text in three_digits(2 * PROMPTS * iterations, seed)
        if text not in HELD_OUT
    ]
    return [
        texts[start : start + PROMPTS]
        for start in range(0, PROMPTS * iterations, PROMPTS)
    ]


def make_requests(texts: list[str], seed: int) -> list[ob.OmniDiffusionRequest]:
    """One request a text, each for a group of pictures; every picture has a seed of its own."""
    return [
        ob.OmniDiffusionRequest(
            sign_prompt(text),
            ob.OmniDiffusionSamplingParams(
                seed=seed + GROUP * place, num_outputs_per_prompt=GROUP, **ROLLOUT
            ),
        )
        for place, text in enumerate(texts)
    ]


def group_rewards(outputs: list[ob.DiffusionOutput], texts: list[str]) -> torch.Tensor:
    """How well each picture's text can be read, (prompts, group), from 0 to 1."""
    return torch.stack(
        [
            text_reward(output.output, [sign_prompt(text)] * GROUP)
            for output, text in zip(outputs, texts)
        ]
    )


# %% [markdown]
# ## One training step
#
# A picture's advantage is its reward less its group's mean. The loss is the clipped one of PPO: with $r$ the ratio of
# the new probability of a stored step to the old, $-\min(rA, \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon)A)$. Replay
# and rollout take the same number of rows per forward, so before the first optimizer step the ratio is exactly 1.


# %%
def update(policy, optimizer, outputs, advantages) -> tuple[torch.Tensor, torch.Tensor]:
    """Take ``EPOCHS`` optimizer steps; return the ratios before the first and before the last, (rows, steps)."""
    ratios = []
    for _ in range(EPOCHS):
        epoch = []
        for output, advantage in zip(outputs, advantages):
            (log_probs,) = replay_log_probs(
                policy, [output], micro_batch_size=GROUP, requires_grad=True
            )
            ratio = (log_probs - output.trajectory_log_probs).exp()
            gain, clipped = (
                ratio * advantage[:, None],
                ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantage[:, None],
            )
            (-torch.minimum(gain, clipped).mean() / len(outputs)).backward()
            epoch.append(ratio.detach())
        torch.nn.utils.clip_grad_norm_(
            [weight for group in optimizer.param_groups for weight in group["params"]],
            1.0,
        )
        optimizer.step()
        optimizer.zero_grad()
        ratios.append(torch.cat(epoch))
    return ratios[0], ratios[-1]


def train(
    seed: int, iterations: int = ITERATIONS, config: ob.RolloutConfig = STEP_WISE
):
    """Train a policy; return it with one row of figures a training step."""
    policy = make_policy(seed)
    engine = ob.RolloutEngine(policy, config)
    optimizer = torch.optim.AdamW(
        [w for w in policy.transformer.parameters() if w.requires_grad], LEARNING_RATE
    )
    rows = []
    for step, texts in enumerate(
        tqdm(training_texts(seed, iterations), desc=f"seed {seed}", leave=False)
    ):
        outputs = engine.generate(
            make_requests(texts, seed=GROUP * PROMPTS * (step + ITERATIONS * seed))
        )
        rewards = group_rewards(outputs, texts)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (
            rewards.std() + 1e-4
        )
        with engine.update_weights():
            first, last = update(policy, optimizer, outputs, advantages)
        rows.append(
            {
                "seed": seed,
                "step": step,
                "reward": float(rewards.mean()),
                "first ratio is 1": bool((first == 1).all()),
                "mean |ratio - 1|": float((last - 1).abs().mean()),
                "clipped": float(((last - 1).abs() > CLIP_RANGE).float().mean()),
            }
        )
    return policy, pd.DataFrame(rows)


# %% [markdown]
# ## The same curve from every mode
#
# With `rows_per_forward` fixed, the modes give the same bits, so whole training runs are equal: every reward, and every
# trained weight.

# %% tags=["nbval-ignore-output"]
MODES = {
    "serial": ob.RolloutConfig(rows_per_forward=GROUP),
    "request-level": ob.RolloutConfig(max_num_seqs=PROMPTS, rows_per_forward=GROUP),
    "step-wise": STEP_WISE,
}
short_runs = {
    mode: train(seed=0, iterations=5, config=config) for mode, config in MODES.items()
}
reference, reference_curve = short_runs["serial"]
for mode, (policy, curve) in short_runs.items():
    assert curve.equals(reference_curve), mode
    weights = zip(policy.transformer.parameters(), reference.transformer.parameters())
    assert all(torch.equal(ours, theirs) for ours, theirs in weights), mode
pd.DataFrame({mode: curve["reward"] for mode, (_, curve) in short_runs.items()}).round(
    4
)

# %% [markdown]
# ## Three runs


# %%
def evaluate(policy: ob.RolloutAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean reward of each held-out text, and a picture of each; always the same noise."""
    outputs = ob.RolloutEngine(policy, STEP_WISE).generate(
        make_requests(HELD_OUT, seed=10**9)
    )
    return group_rewards(outputs, HELD_OUT).mean(dim=1), torch.stack(
        [output.output[0] for output in outputs]
    )


started = time.perf_counter()
before, pictures_before = evaluate(make_policy(seed=0))
curves, after, pictures_after = [], {}, {}
for seed in SEEDS:
    policy, curve = train(seed)
    curves.append(curve)
    after[seed], pictures_after[seed] = evaluate(policy)
minutes = (time.perf_counter() - started) / 60
history = pd.concat(curves)

# %% tags=["nbval-ignore-output"]
summary = pd.DataFrame(
    [
        {
            "seed": seed,
            "held-out reward before": float(before.mean()),
            "after": float(rewards.mean()),
            "rise": float((rewards - before).mean()),
            "standard error of the rise": float(
                (rewards - before).std() / len(before) ** 0.5
            ),
        }
        for seed, rewards in after.items()
    ]
).set_index("seed")
print(f"{len(SEEDS)} runs of {ITERATIONS} training steps, {minutes:.1f} minutes in all")
summary.round(3)

# %% [markdown]
# The rise is many times its standard error in every run, and every first ratio was exactly 1.

# %%
assert (summary["rise"] > 4 * summary["standard error of the rise"]).all()
assert history["first ratio is 1"].all()

# %% tags=["nbval-ignore-output"]
figure, (reward_axes, ratio_axes) = plt.subplots(
    1, 2, figsize=(10, 3.6), layout="constrained"
)
for seed, curve in history.groupby("seed"):
    (line,) = reward_axes.plot(curve["step"], curve["reward"], alpha=0.25)
    smooth = curve["reward"].rolling(10, center=True, min_periods=5).mean()
    reward_axes.plot(
        curve["step"], smooth, color=line.get_color(), label=f"seed {seed}"
    )
    ratio_axes.plot(
        curve["step"],
        curve["mean |ratio - 1|"],
        color=line.get_color(),
        label=f"seed {seed}",
    )
reward_axes.set(
    xlabel="training step", ylabel="mean reward of the rollouts", title="Reward"
)
ratio_axes.axhline(CLIP_RANGE, color="gray", linestyle="--", label="clip range")
ratio_axes.set(
    xlabel="training step",
    ylabel="mean |ratio - 1|",
    yscale="log",
    title="Ratio before the second optimizer step",
)
reward_axes.legend()
ratio_axes.legend()
plt.show()

# %% [markdown]
# The same seeds before and after training, with the texts that were asked for:

# %% tags=["nbval-ignore-output"]
figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 2.7), layout="constrained")
for axes, pictures, title in (
    (top, pictures_before, "before"),
    (bottom, pictures_after[SEEDS[-1]], "after"),
):
    axes.imshow(torch.cat(list(pictures[:10]), dim=2).permute(1, 2, 0))
    axes.set_xticks([32 + 64 * place for place in range(10)], HELD_OUT[:10])
    axes.set(ylabel=title, yticks=[])
plt.show()
