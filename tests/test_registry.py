"""From a model's name to its adapter."""

import json
import shutil

import pytest
import torch

import omnibatch as ob
from omnibatch import tiny
from omnibatch.adapters import registry


def test_a_folder_and_a_pipeline_object_load_like_an_embedded_name(adapters, tmp_path):
    adapter = adapters["tiny-sd35"]
    folder = shutil.copytree(tiny.model_path("tiny-sd35"), tmp_path / "model")
    from_folder = ob.load(folder, device="cpu", dtype=torch.float32)
    assert type(from_folder) is type(adapter)
    held = ob.load(adapter.pipeline)
    assert held.pipeline is adapter.pipeline
    for name, weight in held.transformer.state_dict().items():
        assert torch.equal(weight, from_folder.transformer.state_dict()[name])


def test_dtype_is_the_models(adapters):
    assert ob.load("tiny-qwen-image", device="cpu", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert adapters["tiny-qwen-image"].dtype == torch.float32


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "models/"])
def test_an_unknown_name_is_named(name):
    with pytest.raises(ValueError, match="neither an embedded model"):
        ob.load(name)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        ob.load(tmp_path)


def test_a_model_without_an_adapter_is_named(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="no adapter for the pipeline class 'FluxPipeline'"):
        ob.load(tmp_path)


def test_an_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="algorithm 'ppo'"):
        ob.load("tiny-sd35", algorithm="ppo")


def test_registered_adapters_are_found(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    @ob.register_adapter("FluxPipeline")
    class FluxAdapter(ob.RolloutAdapter): ...

    assert registry.adapter_class("FluxPipeline", "flow_grpo") is FluxAdapter
    with pytest.raises(ValueError, match="no adapter for FluxPipeline and the algorithm 'ppo'"):
        registry.adapter_class("FluxPipeline", "ppo")
