"""Requests, outputs and callers that must not reach into each other; each case was once a defect."""

import asyncio
import warnings

import pytest
import torch
from fake_adapter import FakeAdapter
from test_async_engine import SlowAdapter

import omnibatch as ob
from omnibatch.request import RequestAborted

STEP = ob.RolloutConfig(step_execution=True, max_num_seqs=4)


def fake_request(name, **sampling):
    return ob.OmniDiffusionRequest("a", ob.OmniDiffusionSamplingParams(**({"num_inference_steps": 3} | sampling)), name)


@pytest.mark.parametrize("field", ["timesteps", "sigmas", "prompt_embeds", "latents", "output", "trajectory_latents"])
def test_editing_an_output_changes_no_other_rollout(adapter, make_request, assert_same, field):
    engine = ob.RolloutEngine(adapter)
    (expected,) = engine.generate([make_request()])
    (edited,) = engine.generate([make_request()])
    getattr(edited, field).zero_()
    (after,) = engine.generate([make_request()])
    assert_same(after, expected, tolerance=0)


@pytest.mark.parametrize(
    "bad",
    [
        fake_request("bad", height=[64]),
        ob.OmniDiffusionRequest("a", None, "bad"),
        ob.OmniDiffusionRequest("a", {}, "bad"),
        "hello",
    ],
)
def test_a_malformed_request_fails_alone(bad):
    engine = ob.RolloutEngine(FakeAdapter(), STEP)
    outputs = engine.generate([fake_request("good"), bad], return_errors=True)
    assert outputs[0].error is None
    assert isinstance(outputs[1].error, ValueError)
    assert not engine.has_unfinished


@pytest.mark.parametrize("length", [0, 5000])
def test_embeddings_of_a_strange_length_harm_nobody(adapter, make_request, assert_same, length):
    config = adapter.transformer.config
    prompt = {"prompt_embeds": torch.zeros(length, config.joint_attention_dim)}
    if hasattr(config, "pooled_projection_dim"):
        prompt["pooled_prompt_embeds"] = torch.zeros(config.pooled_projection_dim)
    (expected,) = ob.RolloutEngine(adapter, ob.RolloutConfig(rows_per_forward=4)).generate([make_request()])
    fixed = ob.RolloutConfig(step_execution=True, max_num_seqs=4, rows_per_forward=4)
    outputs = ob.RolloutEngine(adapter, fixed).generate(
        [make_request(), make_request(prompt, "strange")], return_errors=True
    )
    assert_same(outputs[0], expected, tolerance=0)
    assert (outputs[1].error is not None) == (length == 0)


@pytest.mark.parametrize("prompt_embeds", [float("nan"), float("inf")])
def test_embeddings_that_are_not_finite_are_named(adapter, make_request, prompt_embeds):
    embeds = torch.full((3, adapter.transformer.config.joint_attention_dim), prompt_embeds)
    (output,) = ob.RolloutEngine(adapter).generate([make_request({"prompt_embeds": embeds})], return_errors=True)
    assert str(output.error) == "prompt_embeds must be finite"


def test_ids_beyond_the_vocabulary_are_named(adapter, make_request):
    ids = adapter.tokenize("x")
    prompt = {"extra_prompt_ids": ids | {"t5": [10**6]}} if isinstance(ids, dict) else {"prompt_ids": [*ids, -1]}
    (output,) = ob.RolloutEngine(adapter).generate([make_request(prompt)], return_errors=True)
    assert "must be from 0 to" in str(output.error)


@pytest.mark.parametrize("noise_level", [1e-25, 1e200, 10**400, True, "0.7"])
def test_noise_that_float32_cannot_score_is_named(adapter, make_request, noise_level):
    request = make_request(extra_args={"noise_level": noise_level})
    (output,) = ob.RolloutEngine(adapter).generate([request], return_errors=True)
    assert "noise_level must be 0 or a number from 1e-4 to 100" in str(output.error)


def test_a_stream_keeps_its_outputs_from_step():
    engine = ob.RolloutEngine(FakeAdapter(), STEP)
    stream = engine.stream([fake_request("a", num_inference_steps=2), fake_request("b", num_inference_steps=5)])
    assert next(stream).request_id == "a"
    engine.submit(fake_request("late"))
    stepped = []
    while engine.has_unfinished:
        stepped += engine.step()
    assert [output.request_id for output in stepped] == ["late"]
    assert [output.request_id for output in stream] == ["b"]


def test_a_scheduler_that_is_replaced_is_noticed(adapters, make_request):
    adapter = type(adapters["tiny-sd35"])(ob.load("tiny-sd35", device="cpu").pipeline)
    scheduler_class, config = type(adapter.pipeline.scheduler), dict(adapter.pipeline.scheduler.config)
    for index in range(10):
        adapter.pipeline.scheduler = None
        adapter.pipeline.scheduler = scheduler_class.from_config(config, use_karras_sigmas=bool(index % 2))
        (output,) = ob.RolloutEngine(adapter).generate([make_request(output_type="latent")])
        expected = scheduler_class.from_config(config, use_karras_sigmas=bool(index % 2))
        expected.set_timesteps(4)
        assert torch.equal(output.sigmas, expected.sigmas)


class TestLora:
    @pytest.fixture
    def loaded(self, adapter):
        from peft import LoraConfig

        name = "tiny-sd35" if "Diffusion3" in type(adapter).__name__ else "tiny-qwen-image"
        loaded = ob.load(name, device="cpu", dtype=torch.bfloat16)
        for adapter_name in ("za", "ab"):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                loaded.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"]), adapter_name)
        for key, weight in loaded.transformer.named_parameters():
            if "lora_B" in key:
                weight.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(key)))
        return loaded

    def test_a_broken_adapter_reaches_only_who_asks_for_it(self, loaded, make_request):
        loaded.transformer.set_adapter("za")
        for key, weight in loaded.transformer.named_parameters():
            if "lora_B.ab" in key:
                weight.data.fill_(float("nan"))
        requests = [make_request(), make_request(request_id="ab", lora_request="ab")]
        requests.append(make_request(request_id="za", lora_request="za"))
        outputs = ob.RolloutEngine(loaded, STEP).generate(requests, return_errors=True)
        assert [type(output.error) for output in outputs] == [type(None), FloatingPointError, type(None)]

    def test_two_active_adapters_keep_their_order_beside_others(self, loaded, make_request, assert_same):
        loaded.transformer.set_adapters(["za", "ab"])
        fixed = ob.RolloutConfig(step_execution=True, max_num_seqs=4, rows_per_forward=4)
        (expected,) = ob.RolloutEngine(loaded, fixed).generate([make_request()])
        beside = [make_request(), make_request(request_id="ab", lora_request="ab")]
        assert_same(ob.RolloutEngine(loaded, fixed).generate(beside)[0], expected, tolerance=0)

    def test_merged_weights_and_other_variants_are_refused_by_name(self, loaded, make_request):
        from peft import LoraConfig

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            loaded.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q"], use_dora=True), "dora")
        loaded.transformer.set_adapter("za")
        requests = [make_request(), make_request(request_id="dora", lora_request="dora")]
        plain, dora = ob.RolloutEngine(loaded, STEP).generate(requests, return_errors=True)
        assert plain.error is None
        assert "adapter 'dora', which is not a plain LoRA" in str(dora.error)
        loaded.transformer.fuse_lora(adapter_names=["za"])
        requests[1].sampling_params.lora_request = "ab"
        plain, merged = ob.RolloutEngine(loaded, STEP).generate(requests, return_errors=True)
        assert plain.error is None
        assert "while LoRA weights are merged" in str(merged.error)


class TestAsync:
    def run(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, timeout=30))

    def test_a_cancelled_update_is_only_given_up(self):
        adapter = SlowAdapter()

        async def main():
            async with ob.AsyncRolloutEngine(ob.RolloutEngine(adapter, STEP)) as engine:
                tasks = [asyncio.create_task(engine.generate(fake_request(str(index)))) for index in range(6)]
                await asyncio.to_thread(adapter.entered.wait)

                async def update():
                    async with engine.update_weights():
                        pass

                updating = asyncio.create_task(update())
                await asyncio.sleep(0.01)
                updating.cancel()
                await asyncio.sleep(0)
                adapter.go_on.set()
                return await asyncio.gather(*tasks), await engine.generate(fake_request("later"))

        outputs, later = self.run(main())
        assert all(output.error is None for output in [*outputs, later])

    def test_closing_or_updating_within_an_update_does_not_hang(self):
        async def main():
            engine = ob.AsyncRolloutEngine(ob.RolloutEngine(FakeAdapter(), STEP))
            async with engine.update_weights():
                with pytest.raises(RuntimeError, match="being updated already"):
                    async with engine.update_weights():
                        pass
                await asyncio.to_thread(engine.close)

        self.run(main())

    def test_a_timed_out_request_may_be_tried_again_under_its_id(self):
        adapter = SlowAdapter()

        async def main():
            async with ob.AsyncRolloutEngine(ob.RolloutEngine(adapter, STEP)) as engine:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(engine.generate(fake_request("same", num_inference_steps=300)), 0.05)
                adapter.go_on.set()
                return await engine.generate(fake_request("same"))

        assert self.run(main()).error is None


def test_an_aborted_request_says_so():
    engine = ob.RolloutEngine(FakeAdapter(), STEP)
    engine.submit(fake_request("a"))
    engine.abort("a")
    (output,) = engine.step()
    assert isinstance(output.error, RequestAborted)
    assert "request_id='a'" in repr(output)
