"""What it costs to recompute log-probs at another batch shape: ``python -m omnibatch.bench.replay_mismatch``.

Rollouts are packed 64 rows at a time, log-probs are recomputed 8 at a time, in bfloat16 and with the same weights. All
ratios of new to old probability should be 1. Flow-GRPO clips them at 1e-5 from 1, so a mismatch of that size takes
steps out of the gradient before anything was learned.
"""

from __future__ import annotations

import pandas as pd
import torch
from tqdm import tqdm

from omnibatch import OmniDiffusionSamplingParams, RolloutConfig, RolloutEngine, load, tiny
from omnibatch.adapters.base import RolloutAdapter
from omnibatch.prompt_files import make_requests
from omnibatch.replay import replay_log_probs

ROLLOUT_ROWS, REPLAY_ROWS, CLIP_RANGE = 64, 8, 1e-5


def measure(adapter: RolloutAdapter) -> pd.DataFrame:
    """Roll out and replay with and without fixed rows.

    Returns:
        A row each: mean and largest |log ratio|, and the share of ratios outside the clip range.
    """
    sampling = OmniDiffusionSamplingParams(
        height=tiny.IMAGE_SIZE,
        width=tiny.IMAGE_SIZE,
        guidance_scale=1.0,
        max_sequence_length=32,
        extra_args={"sde_window_size": 2, "sde_window_range": (0, 5)},
    )
    requests = make_requests(
        tiny.EXAMPLE_PROMPTS, sampling, images_per_prompt=ROLLOUT_ROWS // len(tiny.EXAMPLE_PROMPTS)
    )
    rows = []
    for rows_per_forward in (None, REPLAY_ROWS):
        config = RolloutConfig(max_num_seqs=ROLLOUT_ROWS, rows_per_forward=rows_per_forward)
        outputs = RolloutEngine(adapter, config).generate(requests)
        replayed = torch.cat(replay_log_probs(adapter, outputs, micro_batch_size=REPLAY_ROWS))
        stored = torch.cat([o.trajectory_log_probs for o in outputs if o.trajectory_log_probs is not None])
        log_ratio = (replayed - stored).double()
        clipped = (log_ratio.exp() - 1).abs() > CLIP_RANGE
        rows.append(
            {
                "rollout rows": rows_per_forward or ROLLOUT_ROWS,
                "replay rows": REPLAY_ROWS,
                "mean |log ratio|": float(log_ratio.abs().mean()),
                "largest |log ratio|": float(log_ratio.abs().max()),
                "clipped at 1e-5": f"{float(clipped.double().mean()):.1%}",
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    """Print a table a model."""
    for name in tqdm(tiny.MODEL_NAMES, desc="rolling out and replaying", unit="model"):
        table = measure(load(name, device="cpu", dtype=torch.bfloat16))
        print(f"\n{name}, bfloat16\n{table.to_string(index=False, float_format='{:.2e}'.format)}")


if __name__ == "__main__":
    main()
