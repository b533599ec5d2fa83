"""The recipes' performance tables: what is built, what is counted, what is written."""

import time

import pytest
import torch

import omnibatch as ob
from omnibatch import tiny
from omnibatch.bench.command import workload_of
from omnibatch.bench.floor import matrix_rate, rollout_operations
from omnibatch.bench.full_size import build_pipeline, embedding_requests
from omnibatch.bench.recipe_table import RecipeTable, TableRow, run_diffusers
from omnibatch.bench.sweeps import sweep_configs, sweep_rows
from omnibatch.bench.transformer_clock import TransformerClock
from omnibatch.cli import main
from omnibatch.prompt_files import make_requests
from omnibatch.recipes import QWEN_IMAGE_FLOW_GRPO, RECIPES, SD35_FLOW_GRPO

BILLIONS = {"qwen_image_flow_grpo": 20.430, "sd35_flow_grpo": 2.243}
# Rank times the widths on both sides of the layers that it is put on, by hand.
LORA_MILLIONS = {
    "qwen_image_flow_grpo": 60 * 64 * (8 * 2 * 3072 + 4 * (3072 + 4 * 3072)) / 1e6,
    # The last block has no output on its text side; the first 13 have a second attention over the image.
    "sd35_flow_grpo": (24 * 8 - 1 + 13 * 4) * 32 * 2 * 1536 / 1e6,
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_the_full_size_models_have_their_parameters(recipe):
    transformer = build_pipeline(recipe, "meta").transformer
    lora = sum(weight.numel() for name, weight in transformer.named_parameters() if "lora" in name)
    everything = sum(weight.numel() for weight in transformer.parameters())
    assert round((everything - lora) / 1e9, 3) == BILLIONS[recipe.name]
    assert lora / 1e6 == pytest.approx(LORA_MILLIONS[recipe.name], rel=1e-3)
    assert {weight.dtype for weight in transformer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_requests_bring_embeddings_that_the_model_takes(recipe, adapters):
    scaled = recipe.scaled()
    adapter = adapters[scaled.model]
    requests = embedding_requests(scaled, adapter.transformer, num_prompts=2, seed=5)
    assert len(requests) == 2 * scaled.images_per_prompt
    outputs = ob.RolloutEngine(adapter, ob.RolloutConfig(max_num_seqs=16)).generate(requests)
    assert [output.seeds for output in outputs] == [[5 + place] for place in range(16)]
    assert all((output.guidance > 1) == (recipe.guidance_scale > 1) for output in outputs)
    if recipe is SD35_FLOW_GRPO:
        assert outputs[0].prompt_embeds.shape[1] == 77 + scaled.max_sequence_length


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("given", ["text", "embeddings"])
def test_the_peer_makes_the_same_pictures(recipe, given):
    adapter, workload, requests_of = workload_of(recipe, "tiny", "cpu")
    if given == "text":
        requests = requests_of(0)[:: workload.images_per_prompt]
    else:
        requests = embedding_requests(workload, adapter.transformer, 4, seed=0)[:: workload.images_per_prompt]
    for request in requests:
        request.sampling_params.extra_args = {"noise_level": 0.0}
        request.sampling_params.num_inference_steps = 3
    ours = torch.cat([output.output for output in ob.RolloutEngine(adapter).generate(requests)])
    for size in (1, 3):
        theirs = run_diffusers(adapter, requests, size)
        assert (theirs * 255 - ours).abs().max() <= 1 + 1e-3


def test_operations_are_those_of_the_rows_that_are_asked_for(adapter):
    sampling = ob.OmniDiffusionSamplingParams(num_inference_steps=2, guidance_scale=1.0, max_sequence_length=32)
    one = make_requests(tiny.EXAMPLE_PROMPTS[:1], sampling, images_per_prompt=1)
    counted = rollout_operations(adapter, one)
    assert (
        rollout_operations(adapter, make_requests(tiny.EXAMPLE_PROMPTS[:1], sampling, images_per_prompt=5))
        == 5 * counted
    )

    products = []
    layers = [layer for layer in adapter.transformer.modules() if isinstance(layer, torch.nn.Linear)]
    hooks = [
        layer.register_forward_hook(lambda layer, args, out: products.append(2 * layer.in_features * out.numel()))
        for layer in layers
    ]
    (output,) = ob.RolloutEngine(adapter).generate(one)
    for hook in hooks:
        hook.remove()
    tokens = adapter.image_tokens(64, 64) + output.prompt_embeds.shape[1]
    config = adapter.transformer.config
    attention = 2 * config.num_layers * 4 * tokens**2 * config.num_attention_heads * config.attention_head_dim
    # The patches' convolution is all that is left.
    assert counted == pytest.approx(sum(products) + attention, rel=0.03)
    assert counted >= sum(products) + attention


def test_the_matrix_rate_is_a_rate():
    assert 1e8 < matrix_rate(torch.device("cpu"), torch.float32, repeats=3) < 1e14


def test_the_clock_counts_the_transformer_alone():
    class Slow(torch.nn.Linear):
        def forward(self, x):
            time.sleep(0.05)
            return super().forward(x)

    transformer = Slow(2, 2)
    with TransformerClock(transformer) as clock:
        transformer(torch.zeros(1, 2))
        time.sleep(0.2)
        transformer(torch.zeros(1, 2))
    assert 0.1 <= clock.seconds < 0.2
    transformer(torch.zeros(1, 2))
    assert clock.seconds < 0.2


def table_of(**rows):
    versions = {"torch": "2", "diffusers": "0"}
    rows = [TableRow(name, None, seconds, [second / 2 for second in seconds], 2**31) for name, seconds in rows.items()]
    return RecipeTable(
        "r", "tiny", "m", True, "a device", "bfloat16", "2026-01-01", versions, 8, 4e12, 2e12, "compiled blocks", rows
    )


def test_ratios_are_taken_round_by_round(tmp_path):
    table = table_of(serial=[4.0, 40.0, 8.0], packed=[2.0, 10.0, 8.0], unfinished=[])
    lines = table.table().set_index("run")
    assert lines.index.tolist() == ["serial", "packed"]
    assert lines["speed-up"].tolist() == [1.0, 2.0]
    assert lines["gen time (s)"].tolist() == [8.0, 8.0]
    assert lines["images/s"].tolist() == [1.0, 1.0]
    assert lines["in transformer"].tolist() == ["50%", "50%"]
    assert table.floor_seconds == 2.0
    assert lines["of the limit"].tolist() == ["25%", "25%"]
    assert lines["peak memory (GiB)"].tolist() == [2.0, 2.0]
    table.save(tmp_path / "table.json")
    assert RecipeTable.read(tmp_path / "table.json") == table


def test_random_weights_and_the_device_are_named_wherever_numbers_are():
    table = table_of(serial=[1.0])
    for shown in (table.heading(), table.markdown(), table._repr_html_()):
        assert "random weights" in shown
        assert "a device" in shown
        assert "compiled blocks" in shown
        assert "2026-01-01" in shown
    assert "random weights" in table.plot()._suptitle.get_text().replace("\n", " ")


def test_another_attention_backend_is_taken_and_named(tmp_path, capsys):
    arguments = [
        "bench",
        "--recipe",
        "sd35_flow_grpo",
        "--scale",
        "tiny",
        "--rounds",
        "1",
        "--quiet",
        "--device",
        "cpu",
    ]
    assert main([*arguments, "--attention-backend", "native"]) == 0
    assert "tiny-sd35, attention native, float32" in capsys.readouterr().out
    for wrong in ("nonsense", "flash"):
        assert main([*arguments, "--attention-backend", wrong]) == 2
        assert wrong in capsys.readouterr().err
    for device in ("nonsense", "meta"):
        assert main([*arguments, "--device", device]) == 2
        assert f"device: '{device}' cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_prints_and_writes_a_table(name, tmp_path, capsys):
    arguments = ["bench", "--recipe", name, "--scale", "tiny", "--rounds", "1", "--quiet", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{name}, scale tiny: 32 images, {RECIPES[name].scaled().model}, float32" in printed
    assert "random weights" not in printed
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"{name}-tiny.json", f"{name}-tiny.md", f"{name}-tiny.png"}
    table = RecipeTable.read(tmp_path / f"{name}-tiny.json")
    assert [len(row.seconds) for row in table.rows] == [1] * 6
    assert table.images == 32


def test_sweeps_cover_what_they_are_given(adapter, make_request):
    sweep = sweep_rows(adapter, make_request(num_inference_steps=2), rows=(1, 3), repeats=1)
    assert sweep["rows"].tolist() == [1, 3]
    assert (sweep["ms a step"] / sweep["rows"] - sweep["ms a row"]).abs().max() < 1e-9
    configs = {"serial": ob.RolloutConfig(), "packed": ob.RolloutConfig(max_num_seqs=2)}
    swept = sweep_configs(
        adapter, lambda _: [make_request(request_id=str(i), num_inference_steps=2) for i in range(2)], configs, 1
    )
    assert swept["configuration"].tolist() == ["serial", "packed"]
    assert swept["ratio to the first"].iloc[0] == 1


def test_a_sweep_ends_where_memory_does(adapter, make_request, monkeypatch):
    def forward(batch):
        if batch.num_rows > 2:
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros_like(batch.latents)

    monkeypatch.setattr(adapter, "denoise_step", forward)
    assert sweep_rows(adapter, make_request(), rows=(1, 2, 4, 8), repeats=1)["rows"].tolist() == [1, 2]


def test_the_minutes_scale_keeps_the_shapes():
    assert QWEN_IMAGE_FLOW_GRPO.images_per_prompt == 16
    _, workload, requests_of = workload_of(QWEN_IMAGE_FLOW_GRPO, "minutes", "meta")
    assert (workload.num_prompts, workload.images_per_prompt, workload.size) == (2, 16, 512)
    assert workload.config == QWEN_IMAGE_FLOW_GRPO.config
    assert callable(requests_of)
