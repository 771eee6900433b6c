from dataclasses import replace

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
    embed_config,
    predict_config,
    read_settings,
)


def test_defaults_are_those_of_the_core() -> None:
    assert predict_config(PredictSettings()) == RunConfig()


def test_what_is_given_wins_over_the_preset() -> None:
    values = {"preset": "virnucpro-500", "chunk_length": 300, "esm_model": "650M", "head": "a.pth"}
    config = predict_config(read_settings(PredictSettings, values))
    assert (config.chunk_length, config.esm_model, config.dnabert_model) == (300, "650M", "DNABERT-S")
    assert config.head == "a.pth"


@pytest.mark.parametrize(
    ("given", "devices"),
    [("auto", ("auto",)), ("0,1", ("0", "1")), ("0, 1", ("0", "1")), (["cpu"], ("cpu",))],
)
def test_devices(given: object, devices: tuple[str, ...]) -> None:
    assert read_settings(EmbedSettings, {"devices": given}).devices == devices


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_length", 0),
        ("chunk_length", 10**12),
        ("repr_layer", -1),
        ("devices", "-1"),
        ("devices", "0,gpu"),
        ("token_budget", -1),
        ("engine", "fast"),
        ("shard_seconds", 0),
        ("shard_seconds", "inf"),
        ("threshold", 1.0),
        ("threshold", float("nan")),
        ("colour", "red"),
        ("mode", "cloud"),
        ("lane_minutes", 0),
    ],
)
def test_wrong_value_is_named(name: str, value: object) -> None:
    kind = LaneSettings if name in LaneSettings.model_fields else PredictSettings
    with pytest.raises(UsageError, match=name):
        read_settings(kind, {name: value})


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"precision.*token_budget"):
        read_settings(EmbedSettings, {"token_budget": 0, "precision": "fp4"})


def test_every_setting_reaches_the_run() -> None:
    engine = {
        "repr_layer": 3,
        "precision": "fp8",
        "devices": ("0", "1"),
        "token_budget": 9,
        "engine": "reference",
        "attention": "triton",
        "compile_mode": "max-autotune",
        "shard_seconds": 2.5,
    }
    assert set(engine) == set(EngineSettings.model_fields)
    embed = embed_config("esm2", "8M", read_settings(EmbedSettings, engine))
    assert {name: getattr(embed, name) for name in engine} == engine
    alone = {"dnabert_precision": "bf16", "dnabert_engine": "reference", "embeddings": "none"}
    predict = predict_config(read_settings(PredictSettings, engine | alone))
    assert {name: getattr(predict, name) for name in engine | alone} == engine | alone


def test_embed_runs_one_model_over_whole_sequences() -> None:
    config = embed_config("dnabert_s", "tiny", EmbedSettings(repr_layer=2))
    assert (config.chunk_length, config.esm_model, config.dnabert_model) == (None, None, "tiny")
    assert config.repr_layer == 2
    assert embed_config("esm2", "8M", EmbedSettings()).esm_model == "8M"


OLD = replace(
    PLAN,
    models=(
        model("dnabert_s", precision="fp32", engine="packed", attention="triton", location="/models/dnabert"),
        model("esm2", precision="fp16", repr_layer=3, attention="triton", location="/models/esm2"),
    ),
)


def reprocessed(**given: object) -> RunConfig:
    return reprocess_config(OLD, read_settings(ReprocessSettings, given))


def test_what_is_not_given_is_as_it_was() -> None:
    assert reprocessed() == RunConfig(
        chunk_length=500,
        esm_model="/models/esm2",
        dnabert_model="/models/dnabert",
        head="/heads/tiny-500",
        repr_layer=3,
        precision="fp16",
        dnabert_precision="fp32",
        engine="packed",
        dnabert_engine="packed",
        attention="triton",
    )


def test_what_goes_with_something_that_is_given_is_found_again() -> None:
    other_model = reprocessed(esm_model="650M")
    assert (other_model.head, other_model.repr_layer, other_model.precision) == (None, None, "fp16")
    assert reprocessed(esm_model="650M", head="a.pth", repr_layer=2).head == "a.pth"
    engine = reprocessed(engine="reference")
    assert (engine.precision, engine.dnabert_precision, engine.dnabert_engine) == ("auto", None, None)
    assert engine.attention == "auto"
    precision = reprocessed(precision="bf16")
    assert (precision.precision, precision.dnabert_precision, precision.attention) == ("bf16", None, "auto")
    assert reprocessed(dnabert_precision="bf16").precision == "fp16"


@pytest.mark.parametrize(
    ("attentions", "expected"),
    [
        (("padded", "padded"), "auto"),
        (("triton", "varlen"), "auto"),
        (("reference", "reference"), "reference"),
    ],
)
def test_attention_that_cannot_be_asked_for_is_found_again(
    attentions: tuple[str, str], expected: str
) -> None:
    models = tuple(
        replace(one, attention=attention) for one, attention in zip(OLD.models, attentions, strict=True)
    )
    assert reprocess_config(replace(OLD, models=models), ReprocessSettings()).attention == expected


def test_a_run_without_a_head_cannot_be_reprocessed() -> None:
    with pytest.raises(UsageError, match="can be reprocessed"):
        reprocess_config(replace(OLD, head=None), ReprocessSettings())
