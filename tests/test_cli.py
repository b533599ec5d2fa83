"""The command, as people type it."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from omnibatch.cli import main


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('a sign that says "42"\nx\n')
    return str(path)


QUICK = ["--steps", "3", "--max-sequence-length", "32", "--device", "cpu", "--quiet"]


def rollout(out, prompts, mode):
    arguments = ["--model", "tiny-sd35", "--prompts", prompts, "--images-per-prompt", "2", "--mode", mode]
    return main(["rollout", *arguments, "--out", str(out), *QUICK])


@pytest.mark.parametrize("mode", ["auto", "serial", "request", "step"])
def test_rollout_writes_the_same_in_every_mode(prompts, tmp_path, capsys, mode):
    out, reference = tmp_path / "out", tmp_path / "reference"
    assert rollout(out, prompts, mode) == 0
    assert "4 of 4 requests finished" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [line["seeds"] for line in lines] == [[0], [1], [2], [3]]
    assert len(list((out / "images").glob("*.png"))) == 4
    assert (out / "contact_sheet.png").is_file()
    assert rollout(reference, prompts, "serial") == 0
    tensors, expected = (load_file(folder / "rollouts.safetensors") for folder in (out, reference))
    assert tensors.keys() == expected.keys()
    for name in tensors:
        torch.testing.assert_close(tensors[name], expected[name], atol=1e-5, rtol=0)


def test_compare_prints_a_row_a_mode(tmp_path, capsys):
    arguments = ["compare", "--model", "tiny-qwen-image", "--images-per-prompt", "1", "--repeats", "1"]
    assert main([*arguments, "--out", str(tmp_path), *QUICK]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["mode", "gen", "time", "(s)", "images/s", "speed-up", "difference"]
    assert [line.split()[0] for line in printed[2:5]] == ["serial", "request", "step"]
    assert all(float(line.split()[-1]) < 1e-5 for line in printed[2:5])
    assert (tmp_path / "contact_sheet.png").is_file()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"--prompts": "/no/such/file.txt"}, "/no/such/file.txt"),
        ({"--model": "no-such-model"}, "no-such-model"),
        ({"--mode": "parallel"}, "'parallel'"),
        ({"--height": "100"}, "height must be a multiple of 16, got 100"),
        ({"--out": "/proc/nowhere"}, "/proc/nowhere"),
        ({"--algorithm": "ppo"}, "'ppo'"),
        ({"--device": "abacus"}, "'abacus'"),
        ({"--steps": "0"}, "--steps"),
        ({"--noise-level": "-1"}, "noise_level must be .* got -1"),
        ({"--sde-window-size": "9"}, "sde_window_size must be .* got 9"),
        ({"--no-such-option": "1"}, "--no-such-option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(prompts, tmp_path, capfd, changed, named):
    arguments = {"--model": "tiny-sd35", "--prompts": prompts, "--out": str(tmp_path / "out")} | changed
    assert main(["rollout", *[word for pair in arguments.items() for word in pair]]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(named, lines[0])


def test_an_empty_prompt_list_is_refused(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    assert (
        main(["rollout", "--model", "tiny-sd35", "--prompts", str(tmp_path / "empty.txt"), "--out", str(tmp_path)]) == 2
    )
    assert "holds no prompt" in capsys.readouterr().err


def test_other_models_bring_no_prompts(capsys):
    assert main(["compare", "--model", "owner/name"]) == 2
    assert "brings none of its own" in capsys.readouterr().err


def test_help_and_version(capsys):
    assert main([]) == 0
    assert main(["rollout", "--help"]) == 0
    assert main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert "compare" in printed
    assert "--images-per-prompt" in printed


@pytest.mark.parametrize("model", ["tiny-qwen-image", "tiny-sd35"])
def test_tune_prints_a_table_and_a_choice(tmp_path, capsys, model):
    arguments = ["tune", "--model", model, "--images-per-prompt", "1", "--repeats", "1", "--cache", str(tmp_path / "c")]
    assert main([*arguments, *QUICK]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:3] == ["mode", "max_num_seqs", "rows_per_forward"]
    assert "<--" in printed
    assert "MiB a row" in printed
    assert re.search(r"take (step|request|serial): ", printed)
    assert main([*arguments, *QUICK]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("measured earlier")
    assert again[1:5] == printed.splitlines()[:4]


@pytest.mark.parametrize("recipe", ["qwen_image_flow_grpo", "sd35_flow_grpo"])
def test_a_recipe_gives_the_defaults(tmp_path, prompts, capsys, recipe):
    model = "tiny-sd35" if "sd35" in recipe else "tiny-qwen-image"
    out = tmp_path / "out"
    arguments = ["rollout", "--recipe", recipe, "--model", model, "--prompts", prompts, "--images-per-prompt", "1"]
    assert main([*arguments, "--out", str(out), "--quiet", "--device", "cpu"]) == 0
    assert f"as in {recipe}" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert all(line["rows_per_forward"] == 8 and line["num_steps"] == 10 for line in lines)
    assert all((line["negative_prompt"] == " ") == ("qwen" in recipe) for line in lines)
    windows = [line["sde_window"] for line in lines]
    assert all(end - start == (2 if "qwen" in recipe else 3) for start, end in windows)


def test_without_model_or_recipe_it_is_said(capsys, prompts, tmp_path):
    assert main(["rollout", "--prompts", prompts, "--out", str(tmp_path)]) == 2
    assert "give --model, or a --recipe" in capsys.readouterr().err
    assert main(["compare", "--recipe", "flux"]) == 2
    assert "recipe must be one of" in capsys.readouterr().err
