"""The folder that a rollout leaves."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import omnibatch as ob
from omnibatch.pictures import contact_sheet
from omnibatch.rollout_files import writable_folder, write_rollouts


@pytest.fixture
def rollouts(adapter, make_request):
    requests = [
        make_request("x", "a", num_outputs_per_prompt=2),
        make_request("x", "bad", height=100),
        make_request("a long prompt", "b", seed=10),
    ]
    return requests, ob.RolloutEngine(adapter).generate(requests, return_errors=True)


def test_everything_that_finished_is_written(rollouts, tmp_path):
    requests, outputs = rollouts
    write_rollouts(tmp_path, requests, outputs)
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["a", "bad", "b"]
    assert [line["rows"] for line in lines] == [[0, 1], [], [2]]
    assert [line["seeds"] for line in lines] == [[0, 1], [], [10]]
    assert lines[1]["error"] == f"ValueError: {outputs[1].error}"
    pictures = [np.asarray(Image.open(tmp_path / name)) for line in lines for name in line["images"]]
    finished = [outputs[0], outputs[2]]
    expected = torch.cat([output.output for output in finished]).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(np.stack(pictures), expected)
    tensors = load_file(tmp_path / "rollouts.safetensors")
    assert torch.equal(tensors["all_latents"], torch.cat([output.trajectory_latents for output in finished]))
    assert torch.equal(tensors["all_log_probs"], torch.cat([output.trajectory_log_probs for output in finished]))
    assert torch.equal(tensors["all_timesteps"], torch.cat([output.trajectory_timesteps for output in finished]))
    assert tensors["sigmas"].shape == (3, 5)
    assert tensors["sde_windows"].tolist() == [[0, 3]] * 3
    assert len(tensors["prompt_embeds"]) == 3


def test_the_contact_sheet_has_a_row_a_prompt(rollouts):
    sheet = contact_sheet(*rollouts)
    assert sheet.height == 2 * (128 + 6) + 6
    assert sheet.width == 190 + 3 * (128 + 6) + 6


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write to"):
        writable_folder(tmp_path / "file" / "folder")
