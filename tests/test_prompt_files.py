"""Prompts from files and the requests made of them."""

import io

import pandas as pd
import pytest

from omnibatch import OmniDiffusionSamplingParams
from omnibatch.prompt_files import make_requests, read_prompts


def test_text_lines(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\n  two  \nthrée\n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "p.txt")) == ["one", "two", "thrée"]


def test_json_lines(tmp_path):
    (tmp_path / "p.jsonl").write_text('"one"\n{"prompt": "two", "negative_prompt": "no"}\n')
    assert read_prompts(str(tmp_path / "p.jsonl")) == ["one", {"prompt": "two", "negative_prompt": "no"}]


def test_parquet(tmp_path):
    pd.DataFrame({"prompt": ["one", None, "two"], "other": [1, 2, 3]}).to_parquet(tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet")) == ["one", "two"]


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert read_prompts("-") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("missing.txt", None, "there is no file"),
        ("p.csv", b"a", r"must end in \.txt"),
        ("empty.txt", b"\n \n", "holds no prompt"),
        ("binary.txt", b"\xff\xfe", "cannot be read as text"),
        ("p.jsonl", b'"one"\n{"text": "two"}\n', r"p\.jsonl:2 must be a string, an object with a 'prompt'"),
        ("p.jsonl", b"{", r"p\.jsonl:1 is not JSON"),
        ("p.parquet", b"nothing", "cannot be read as parquet"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, named):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=named):
        read_prompts(str(tmp_path / name))


def test_parquet_without_the_column_is_named(tmp_path):
    pd.DataFrame({"text": ["one"]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ValueError, match="has no column 'prompt', it has 'text'"):
        read_prompts(str(tmp_path / "p.parquet"))


def seeds(requests):
    return [request.sampling_params.seed for request in requests]


@pytest.mark.parametrize("outputs", [1, 2])
def test_no_noise_is_used_twice_however_the_prompts_are_split(outputs):
    """Field case 9: 48 prompts in one call, or in four calls of 12, get the same 48 seeds."""
    prompts = [f"prompt {index}" for index in range(48)]
    sampling = OmniDiffusionSamplingParams(num_outputs_per_prompt=outputs)
    whole = make_requests(prompts, sampling, images_per_prompt=2, seed=3)
    parts = [
        make_requests(prompts[first : first + 12], sampling, images_per_prompt=2, seed=3 + 2 * outputs * first)
        for first in range(0, 48, 12)
    ]
    assert seeds(whole) == [seed for part in parts for seed in seeds(part)]
    drawn = [g.initial_seed() for request in whole for g in request.sampling_params.draw_generators()]
    assert sorted(drawn) == list(range(3, 3 + 96 * outputs))


def test_a_wrong_number_of_outputs_is_its_requests_error():
    (request,) = make_requests(["a"], OmniDiffusionSamplingParams(num_outputs_per_prompt="2"), seed=3)
    with pytest.raises(ValueError, match="num_outputs_per_prompt must be a positive integer, got '2'"):
        request.validate()


def test_a_negative_prompt_is_for_those_without():
    prompts = ["a", {"prompt": "b", "negative_prompt": "own"}]
    requests = make_requests(prompts, OmniDiffusionSamplingParams(), negative_prompt="general")
    assert [request.prompt_field("negative_prompt") for request in requests] == ["general", "own"]


def test_chat_messages_give_the_users_last_one(tmp_path):
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "draw"},
        {"role": "assistant", "content": "x"},
    ]
    pd.DataFrame({"prompt": [chat]}).to_parquet(tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet")) == ["draw"]


def test_unknown_fields_are_named(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "seed": 3}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:1 has an unknown field 'seed'"):
        read_prompts(str(tmp_path / "p.jsonl"))
