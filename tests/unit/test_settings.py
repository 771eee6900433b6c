"""Settings: presets, defaults, wrong values, and what a run makes of them."""

from typing import Any

import pytest

from virnuc_core.errors import UsageError
from virnuc_core.settings import (
    EmbedSettings,
    EngineSettings,
    LaneSettings,
    PredictSettings,
    RunConfig,
    Settings,
    embed_config,
    predict_config,
    read_settings,
)
from virnuc_core.specs import CallRule

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
        (PredictSettings, {"threshold": 0.9999999}, "threshold"),
        (PredictSettings, {"threshold": 0.0000009}, "threshold"),
        (PredictSettings, {"threshold": float("nan")}, "threshold"),
        (PredictSettings, {"fdr": 0.0}, "fdr"),
        (PredictSettings, {"fdr": 1}, "fdr"),
        (PredictSettings, {"prior": 0}, "prior"),
        (PredictSettings, {"fdr": 0.05, "threshold": 0.9}, "--threshold and --fdr cannot be combined"),
        (
            PredictSettings,
            {"relaxed": True, "threshold": 0.9},
            "--relaxed and --threshold cannot be combined",
        ),
        (
            PredictSettings,
            {"relaxed": True, "fdr": 0.1, "prior": 0.1},
            "--relaxed and --fdr and --prior cannot be combined",
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


def test_calls_are_by_the_sample_a_rate_a_share_or_a_threshold() -> None:
    for given, rule in (
        ({}, CallRule()),
        ({"relaxed": True}, CallRule(threshold=0.5)),
        ({"threshold": 0.7}, CallRule(threshold=0.7)),
        ({"fdr": 0.05, "prior": 0.2}, CallRule(fdr=0.05, prior=0.2)),
    ):
        assert PredictSettings.model_validate(given).calls == rule


def test_every_setting_reaches_the_run() -> None:
    assert set(EVERY_ENGINE_SETTING) == set(EngineSettings.model_fields)
    embed = embed_config("dnabert_s", "tiny", read_settings(EmbedSettings, EVERY_ENGINE_SETTING))
    assert (embed.chunk_length, embed.esm_model, embed.dnabert_model) == (None, None, "tiny")
    assert embed_config("esm2", "8M", EmbedSettings()).esm_model == "8M"
    assert {name: getattr(embed, name) for name in EVERY_ENGINE_SETTING} == EVERY_ENGINE_SETTING
    given = EVERY_ENGINE_SETTING | OF_PREDICT_ALONE
    predict = predict_config(read_settings(PredictSettings, given))
    assert {name: getattr(predict, name) for name in given} == given
