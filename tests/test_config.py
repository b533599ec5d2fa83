"""The engine's knobs."""

import pytest

from omnibatch import ExecutionMode, RolloutConfig


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ({}, ExecutionMode.SERIAL),
        ({"max_num_seqs": 8}, ExecutionMode.REQUEST),
        ({"max_num_seqs": 8, "request_batch_max_wait_ms": 10}, ExecutionMode.REQUEST),
        ({"step_execution": True}, ExecutionMode.STEP),
        ({"step_execution": True, "max_num_seqs": 256}, ExecutionMode.STEP),
    ],
)
def test_mode_follows_from_the_knobs(arguments, mode):
    assert RolloutConfig(**arguments).mode is mode


@pytest.mark.parametrize("mode", list(ExecutionMode))
def test_for_mode_gives_that_mode(mode):
    config = RolloutConfig.for_mode(mode, 8, rows_per_forward=4)
    assert (config.mode, config.rows_per_forward) == (mode, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_execution", "true"),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("rows_per_forward", 0),
        ("request_batch_max_wait_ms", -1),
        ("request_batch_max_wait_ms", float("inf")),
        ("request_batch_max_wait_ms", "10"),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value!r}"):
        RolloutConfig(**{field: value})


def test_the_modes_exclude_each_other():
    with pytest.raises(ValueError, match=r"mutually exclusive; drop request_batch_max_wait_ms .* or step_execution"):
        RolloutConfig(step_execution=True, request_batch_max_wait_ms=10)


LONG = "actor_rollout_ref.rollout.engine_kwargs.vllm_omni."
SHORT = "actor_rollout_ref.rollout."


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{SHORT}step_execution=true", f"++{LONG}max_num_seqs=256"], RolloutConfig(True, 256)),
        (
            [
                f"{SHORT}step_execution=false",
                f"++{LONG}max_num_seqs=256",
                f"++{LONG}request_batch_max_wait_ms=10",
            ],
            RolloutConfig(False, 256, 10),
        ),
        ([f"+{LONG}max_num_seqs=32"], RolloutConfig(max_num_seqs=32)),
        ([f"{SHORT}max_num_seqs=1"], RolloutConfig()),
        (["step_execution=true"], RolloutConfig(True)),
        (["step_execution=false", "max_num_seqs=1"], RolloutConfig()),
        ([f"{SHORT}max_num_seqs=8", f"{SHORT}max_num_seqs=16"], RolloutConfig(max_num_seqs=16)),
        ([f"{SHORT}max_num_seqs=8", f"++{LONG}max_num_seqs=8"], RolloutConfig(max_num_seqs=8)),
        ([f"{SHORT}rows_per_forward=null", "decode_rows=4"], RolloutConfig(decode_rows=4)),
        ([], RolloutConfig()),
    ],
)
def test_overrides_are_read_as_they_are_typed(overrides, expected):
    assert RolloutConfig.from_overrides(overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"{SHORT}max_num_seq=8"], "actor_rollout_ref.rollout.max_num_seq is not a knob"),
        ([f"{SHORT}max_num_seqs=many"], "max_num_seqs must be a positive integer, got 'many'"),
        ([f"{SHORT}step_execution=1"], "step_execution must be true or false, got 1"),
        (
            [f"{SHORT}max_num_seqs=8", f"{LONG}max_num_seqs=16"],
            "vllm_omni.max_num_seqs=16 contradicts .*max_num_seqs=8",
        ),
        ([f"{SHORT}step_execution=true", f"{LONG}request_batch_max_wait_ms=10"], "mutually exclusive"),
        ([f"{SHORT}max_num_seqs=8,16"], "must give one value"),
        ([f"~{SHORT}max_num_seqs"], "must give one value"),
        (["max_num_seqs"], "'max_num_seqs' is not one that Hydra reads"),
    ],
)
def test_bad_overrides_are_named(overrides, named):
    with pytest.raises(ValueError, match=named):
        RolloutConfig.from_overrides(overrides)


def test_yaml_may_be_flat_or_nested(tmp_path):
    flat, nested = tmp_path / "flat.yaml", tmp_path / "nested.yaml"
    flat.write_text("max_num_seqs: 32\nrequest_batch_max_wait_ms: 10\n")
    nested.write_text(
        "actor_rollout_ref:\n  rollout:\n    step_execution: true\n"
        "    engine_kwargs:\n      vllm_omni:\n        max_num_seqs: 256\n"
    )
    assert RolloutConfig.from_yaml(flat) == RolloutConfig(False, 32, 10)
    assert RolloutConfig.from_yaml(str(nested)) == RolloutConfig(True, 256)


@pytest.mark.parametrize(
    ("text", "named"),
    [("max_seqs: 3", "max_seqs is not a knob"), ("[1, 2]", "must hold keys"), ("a: [", "cannot be read")],
)
def test_bad_yaml_is_named(tmp_path, text, named):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=named):
        RolloutConfig.from_yaml(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        RolloutConfig.from_yaml(tmp_path / "missing.yaml")


def test_environment_variables():
    environ = {"MAX_NUM_SEQS": "64", "REQUEST_BATCH_MAX_WAIT_MS": "2.5", "OTHER": "x"}
    assert RolloutConfig.from_environment(environ) == RolloutConfig(False, 64, 2.5)
    assert RolloutConfig.from_environment({"MAX_NUM_SEQS": ""}) == RolloutConfig()
    with pytest.raises(ValueError, match="MAX_NUM_SEQS must be a number, got 'all'"):
        RolloutConfig.from_environment({"MAX_NUM_SEQS": "all"})


def test_overrides_win_over_the_environment_over_yaml(tmp_path):
    (tmp_path / "c.yaml").write_text("max_num_seqs: 1\nrequest_batch_max_wait_ms: 1\ndecode_rows: 1\n")
    environ = {"MAX_NUM_SEQS": "2", "REQUEST_BATCH_MAX_WAIT_MS": "2"}
    config = RolloutConfig.load(yaml=tmp_path / "c.yaml", environ=environ, overrides=["max_num_seqs=3"])
    assert config == RolloutConfig(max_num_seqs=3, request_batch_max_wait_ms=2, decode_rows=1)
    assert RolloutConfig.load() == RolloutConfig()
