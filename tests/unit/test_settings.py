"""Settings: presets, defaults, wrong values, and what a run makes of them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.made_plans import PLAN, model
from virnuc_core.errors import UsageError
from virnuc_core.pipeline import reprocess_config
from virnuc_core.settings import (
    EmbedSettings,
    EngineSettings,
    LaneSettings,
    PredictSettings,
    ReprocessSettings,
    RunConfig,
    Settings,
    embed_config,
    predict_config,
    read_settings,
)

EVERY_ENGINE_SETTING: dict[str, Any] = {
    "repr_layer": 3,
    "precision": "fp8",
    "devices": ("0", "1"),
    "token_budget": 9,
    "engine": "reference",
    "attention": "triton",
    "compile": True,
    "shard_seconds": 2.5,
}
OF_PREDICT_ALONE = {"dnabert_precision": "bf16", "dnabert_engine": "reference", "embeddings": "none"}


def test_what_is_given_wins_over_the_preset() -> None:
    values = {"preset": "virnucpro-500", "chunk_length": 300, "esm_model": "650M", "head": "a.pth"}
    config = predict_config(read_settings(PredictSettings, values))
    assert (config.chunk_length, config.esm_model, config.dnabert_model) == (300, "650M", "DNABERT-S")
    assert config.head == "a.pth"
    assert predict_config(PredictSettings()) == RunConfig()
    for values, chunk_length in (
        ({"chunk_length": "auto"}, "auto"),
        ({"head": "a.pth"}, "auto"),
        ({"head": "a.pth", "chunk_length": "700"}, 700),
        ({"head": "a.pth", "preset": "virnucpro-300"}, 300),
    ):
        assert predict_config(read_settings(PredictSettings, values)).chunk_length == chunk_length
    for chunk_length in (300, 500):
        config = predict_config(read_settings(PredictSettings, {"preset": f"virnucpro-{chunk_length}"}))
        chosen = (config.chunk_length, config.esm_model, config.dnabert_model)
        assert chosen == (chunk_length, "3B", "DNABERT-S")


@pytest.mark.parametrize(
    ("given", "devices"),
    [("auto", ("auto",)), ("0,1", ("0", "1")), ("0, 1", ("0", "1")), (["cpu"], ("cpu",))],
)
def test_devices(given: object, devices: tuple[str, ...]) -> None:
    assert read_settings(EmbedSettings, {"devices": given}).devices == devices


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (PredictSettings, {"chunk_length": 0}, "chunk_length"),
        (PredictSettings, {"chunk_length": 10**12}, "chunk_length"),
        (PredictSettings, {"repr_layer": -1}, "repr_layer"),
        (PredictSettings, {"devices": "-1"}, "devices"),
        (PredictSettings, {"devices": "0,gpu"}, "devices"),
        (PredictSettings, {"token_budget": -1}, "token_budget"),
        (PredictSettings, {"token_budget": 2**31}, "token_budget"),
        (PredictSettings, {"engine": "fast"}, "engine"),
        (PredictSettings, {"shard_seconds": 0}, "shard_seconds"),
        (PredictSettings, {"shard_seconds": "inf"}, "shard_seconds"),
        (PredictSettings, {"dnabert_precision": "fp4"}, "dnabert_precision"),
        (PredictSettings, {"compile": "fast"}, "compile"),
        (PredictSettings, {"threshold": 1.0}, "threshold"),
        (PredictSettings, {"threshold": float("nan")}, "threshold"),
        (PredictSettings, {"fdr": 0.0}, "fdr"),
        (
            PredictSettings,
            {"fdr": 0.05, "threshold": 0.9},
            r"--fdr 0\.05 .* leave out --threshold 0\.9, or --fdr",
        ),
        (PredictSettings, {"colour": "red"}, "colour"),
        (LaneSettings, {"mode": "cloud"}, "mode"),
        (LaneSettings, {"lane_minutes": 0}, "lane_minutes"),
        (EmbedSettings, {"token_budget": 0, "precision": "fp4"}, "precision.*token_budget"),
    ],
)
def test_wrong_values_are_named(kind: type[Settings], values: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read_settings(kind, values)


def test_every_setting_reaches_the_run() -> None:
    assert set(EVERY_ENGINE_SETTING) == set(EngineSettings.model_fields)
    embed = embed_config("dnabert_s", "tiny", read_settings(EmbedSettings, EVERY_ENGINE_SETTING))
    assert (embed.chunk_length, embed.esm_model, embed.dnabert_model) == (None, None, "tiny")
    assert embed_config("esm2", "8M", EmbedSettings()).esm_model == "8M"
    assert {name: getattr(embed, name) for name in EVERY_ENGINE_SETTING} == EVERY_ENGINE_SETTING
    given = EVERY_ENGINE_SETTING | OF_PREDICT_ALONE
    predict = predict_config(read_settings(PredictSettings, given))
    assert {name: getattr(predict, name) for name in given} == given


OLD = replace(
    PLAN,
    models=(
        model("dnabert_s", precision="fp32", engine="packed", attention="triton", location="/models/dnabert"),
        model("esm2", precision="fp16", repr_layer=3, attention="triton", location="/models/esm2"),
    ),
)
AS_IT_WAS = RunConfig(
    chunk_length=500,
    esm_model="/models/esm2",
    dnabert_model="/models/dnabert",
    head="/heads/head_500.pth",
    repr_layer=3,
    precision="fp16",
    dnabert_precision="fp32",
    engine="packed",
    dnabert_engine="packed",
    attention="triton",
)


@pytest.mark.parametrize(
    ("given", "found_again"),
    [
        ({}, {}),
        ({"esm_model": "650M"}, {"head": None, "repr_layer": None}),
        ({"esm_model": "650M", "head": "a.pth", "repr_layer": 2}, {}),
        (
            {"engine": "reference"},
            {"precision": "auto", "dnabert_precision": None, "dnabert_engine": None, "attention": "auto"},
        ),
        ({"precision": "bf16"}, {"dnabert_precision": None, "attention": "auto"}),
        ({"dnabert_precision": "bf16"}, {"attention": "auto"}),
    ],
)
def test_reprocessing_keeps_what_does_not_go_with_something_that_is_given(
    given: dict[str, Any], found_again: dict[str, Any]
) -> None:
    config = reprocess_config(OLD, read_settings(ReprocessSettings, given))
    assert config == AS_IT_WAS.model_copy(update=found_again | given)


@pytest.mark.parametrize(
    ("attentions", "expected"),
    [
        (("triton", "flash-attn"), "auto"),
        (("reference", "reference"), "reference"),
    ],
)
def test_attention_that_cannot_be_asked_for_is_found_again(
    attentions: tuple[str, str], expected: str
) -> None:
    dnabert, esm2 = (replace(one, attention=how) for one, how in zip(OLD.models, attentions, strict=True))
    old = replace(OLD, models=(dnabert, esm2))
    assert reprocess_config(old, ReprocessSettings()).attention == expected


@pytest.mark.parametrize("rule", [{"threshold": 0.9}, {"fdr": 0.05}])
def test_reprocessing_keeps_the_rule_of_calls(rule: dict[str, float]) -> None:
    config = reprocess_config(replace(OLD, **rule), ReprocessSettings())
    assert config == AS_IT_WAS.model_copy(update=rule)


def test_a_run_without_a_head_cannot_be_reprocessed() -> None:
    with pytest.raises(UsageError, match="can be reprocessed"):
        reprocess_config(replace(OLD, head=None), ReprocessSettings())
