"""Measuring and picking."""

import itertools
import json

import pytest
import torch
from fake_adapter import FakeAdapter, PackedForward

import omnibatch as ob
from omnibatch import measure as module
from omnibatch.measure import measure


class Measurable(FakeAdapter):
    device = torch.device("cpu")
    dtype = torch.float32


def requests(count=8, outputs=1):
    sampling = ob.OmniDiffusionSamplingParams(num_inference_steps=2, num_outputs_per_prompt=outputs, seed=1)
    return [ob.OmniDiffusionRequest("a", sampling, str(index)) for index in range(count)]


@pytest.fixture
def clock(monkeypatch):
    """Make each run of a configuration take the seconds that a table says."""

    def use(seconds):
        runs = []

        def run(adapter, requests, config):
            runs.append(config)
            return seconds(config), None, True

        monkeypatch.setattr(module, "_run", run)
        return runs

    return use


def test_the_fastest_capacity_of_the_fastest_mode_is_taken(clock):
    runs = clock(
        lambda config: {"serial": 9.0, "request": 8.0, "step": 7.0}[config.mode.value] - config.max_num_seqs % 7
    )
    result = measure(Measurable(), requests(), capacities=(2, 4, 8, 16))
    assert result.config == ob.RolloutConfig(step_execution=True, max_num_seqs=4, rows_per_forward=4)
    assert "step was measured fastest" in result.reason
    assert len(runs) == 7 * 4
    assert runs[:7] == runs[7:14]
    assert result.measured[0].images_per_second == 1.0


def test_a_tie_goes_to_step_wise(clock):
    clock(lambda config: 1.0)
    result = measure(Measurable(), requests(), capacities=(4,))
    assert result.config.mode is ob.ExecutionMode.STEP
    assert "within 3%" in result.reason


def test_rows_count_every_output(clock):
    clock(lambda config: 1.0 / config.max_num_seqs)
    result = measure(Measurable(), requests(outputs=3), capacities=(4,))
    assert (result.config.max_num_seqs, result.config.rows_per_forward) == (4, 12)


def test_an_adapter_without_batching_stays_serial():
    class Plain(PackedForward):
        supports_request_batch = False
        device = Measurable.device
        dtype = Measurable.dtype

        def shape_key(self, request):
            return None

    result = measure(Plain(), requests(2))
    assert result.config == ob.RolloutConfig()
    assert "supports no batching" in result.reason


def test_really_run_it_gives_a_table():
    table = measure(Measurable(), requests(), capacities=(2, 8), repeats=1).table()
    assert table["mode"].tolist() == ["serial", "step", "request", "step", "request"]
    assert table["max_num_seqs"].tolist() == [1, 2, 2, 8, 8]
    assert (table["choice"] == "<--").sum() == 1
    assert (table["gen time (s)"] > 0).all()


def test_a_cache_that_cannot_be_used_is_named_before_anything_is_measured(tmp_path):
    broken, other = tmp_path / "broken.json", tmp_path / "list.json"
    broken.write_text("{")
    other.write_text("[]")
    for path, wrong in (
        (broken, "read as JSON"),
        (other, "a JSON object, got list"),
        (tmp_path / "no" / "c", "folder"),
    ):
        with pytest.raises(ValueError, match=f"^cache: .*{wrong}"):
            measure(Measurable(), requests(), cache=path)


def test_a_measurement_is_cached(clock, tmp_path):
    runs = clock(lambda config: 1.0 / config.max_num_seqs)
    cache = tmp_path / "cache.json"
    first = measure(Measurable(), requests(), cache=cache)
    count = len(runs)
    assert measure(Measurable(), requests(), cache=cache) == first
    assert len(runs) == count
    (key,) = json.loads(cache.read_text())
    assert key.startswith("Measurable | cpu | torch.float32 | None | ")
    longer = requests()
    for request in longer:
        request.sampling_params.num_inference_steps += 1
    measure(Measurable(), longer, cache=cache)
    assert len(json.loads(cache.read_text())) == 2
    other = [ob.OmniDiffusionRequest("a", ob.OmniDiffusionSamplingParams(height=8, seed=1), "other")]
    measure(Measurable(), other, cache=cache)
    assert len(json.loads(cache.read_text())) == 3


def test_what_did_not_fit_is_not_proposed(monkeypatch):
    def run(adapter, requests, config):
        return 1.0 / config.max_num_seqs, None, config.max_num_seqs < 8

    monkeypatch.setattr(module, "_run", run)
    result = measure(Measurable(), requests(), capacities=(4, 8))
    assert result.config.max_num_seqs == 4
    assert all(entry.config.max_num_seqs < 8 for entry in result.measured)


def test_capacities_that_would_not_fit_are_left_out(monkeypatch):
    class Properties:
        total_memory = 1000

    ran = []

    def run(adapter, requests, config):
        ran.append(config.max_num_seqs)
        return 1.0, 100 + 50 * config.max_num_seqs, True

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module.torch.cuda, "get_device_properties", lambda device: Properties)
    table = measure(Measurable(), requests(32), capacities=(4, 8, 16, 32)).table()
    assert sorted(set(ran)) == [1, 4, 8, 16]
    assert table["max_num_seqs"].max() == 16
    assert "peak memory (GiB)" in table.columns


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match="requests must hold at least one"):
        measure(Measurable(), [])


def test_combinations_of_signals_wishes_and_times():
    """Every combination that dispatching can meet ends in a supported mode with a reason."""
    from omnibatch.dispatch import choose_mode, supported_modes

    adapters = [FakeAdapter(), PackedForward(), object()]
    times = [None, 1.0, 1.02, 2.0]
    for adapter, *seconds in itertools.product(adapters, times, times, times):
        measured = {mode: value for mode, value in zip(ob.ExecutionMode, seconds) if value is not None}
        mode, reason = choose_mode(adapter, measured)
        supported = supported_modes(adapter)
        assert mode in supported
        known = {m: s for m, s in measured.items() if m in supported}
        if len(known) > 1:
            assert known[mode] <= 1.03 * min(known.values())
            assert "measured" in reason
        else:
            assert mode is supported[0]
            assert "not measured" in reason or "no batching" in reason
