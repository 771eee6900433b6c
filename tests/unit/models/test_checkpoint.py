"""Checkpoints in every published layout give the same tensors; broken and hostile ones give one clear error."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.reliability.hostile import hostile_json, safetensors_headers
from benchmarks.reliability.samples import make_models
from tests.made_models import make_tokenizer
from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.checkpoint import load_model, parameter_shapes
from virnuc_core.models.hub import family_of, open_checkpoint
from virnuc_core.models.positions import pair_rows
from virnuc_core.specs import Family, ModelSpec

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
ESM2_SPEC = ModelSpec(
    family="esm2",
    num_layers=2,
    embedding_dim=24,
    num_heads=3,
    ffn_dim=40,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
ESM2_CONFIG = {
    "model_type": "esm",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 33,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "emb_layer_norm_before": False,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "max_position_embeddings": 50,
}
FAIR_ESM_ARGUMENTS = {
    "encoder_layers": 2,
    "encoder_embed_dim": 24,
    "encoder_attention_heads": 3,
    "token_dropout": True,
}

Tensors = dict[str, Tensor]


def linear(key: str, outputs: int, inputs: int) -> Tensors:
    return {f"{key}.weight": torch.randn(outputs, inputs), f"{key}.bias": torch.randn(outputs)}


def norm(key: str, width: int) -> Tensors:
    return {f"{key}.weight": torch.randn(width), f"{key}.bias": torch.randn(width)}


def esm_model() -> Tensors:
    """Random weights named as in transformers' EsmModel."""
    torch.manual_seed(1)
    tensors = {"embeddings.word_embeddings.weight": torch.randn(33, 24)}
    for n in range(2):
        layer = f"encoder.layer.{n}"
        for part in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{part}", 24, 24)
        tensors |= linear(f"{layer}.attention.output.dense", 24, 24)
        tensors |= norm(f"{layer}.attention.LayerNorm", 24)
        tensors |= linear(f"{layer}.intermediate.dense", 40, 24)
        tensors |= linear(f"{layer}.output.dense", 24, 40)
        tensors |= norm(f"{layer}.LayerNorm", 24)
    return tensors | norm("encoder.emb_layer_norm_after", 24)


def masked_lm() -> Tensors:
    """The same as EsmForMaskedLM, with the extra tensors of published files."""
    return {f"esm.{key}": value for key, value in esm_model().items()} | {
        "lm_head.bias": torch.zeros(33),
        **linear("lm_head.dense", 24, 24),
        "esm.embeddings.position_embeddings.weight": torch.zeros(50, 24),
        "esm.embeddings.position_ids": torch.arange(50)[None],
        "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq": torch.zeros(4),
        "esm.contact_head.regression.weight": torch.zeros(1, 6),
    }


def fair_esm(prefix: str = "") -> Tensors:
    """The same named as in fair-esm."""
    renames = [
        ("embeddings.word_embeddings", "embed_tokens"),
        ("encoder.emb_layer_norm_after", "emb_layer_norm_after"),
        ("encoder.layer.", "layers."),
        ("attention.self.query", "self_attn.q_proj"),
        ("attention.self.key", "self_attn.k_proj"),
        ("attention.self.value", "self_attn.v_proj"),
        ("attention.output.dense", "self_attn.out_proj"),
        ("attention.LayerNorm", "self_attn_layer_norm"),
        ("intermediate.dense", "fc1"),
        ("output.dense", "fc2"),
        ("LayerNorm", "final_layer_norm"),
    ]
    renamed = {}
    for key, value in esm_model().items():
        for theirs, ours in renames:
            key = key.replace(theirs, ours)
        renamed[prefix + key] = value
    frequencies = {f"{prefix}layers.{n}.self_attn.rot_emb.inv_freq": torch.zeros(4) for n in range(2)}
    return renamed | frequencies | {f"{prefix}lm_head.weight": torch.zeros(33, 24)}


def in_fair_esm_file(folder: Path, **arguments: object) -> Path:
    cfg = {"model": argparse.Namespace(**(FAIR_ESM_ARGUMENTS | arguments))}
    content = {"args": argparse.Namespace(arch="esm2"), "cfg": cfg}
    torch.save(content | {"model": fair_esm("encoder.sentence_encoder.")}, folder / "esm2.pt")
    return folder / "esm2.pt"


def in_torch_file(folder: Path, tensors: Tensors, *, name: str = "weights.pt", zipped: bool = True) -> Path:
    torch.save(tensors, folder / name, _use_new_zipfile_serialization=zipped)
    return folder / name


def in_folder(folder: Path, tensors: Tensors, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(ESM2_CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def in_bin_folder(folder: Path, tensors: Tensors) -> Path:
    (folder / "config.json").write_text(json.dumps(ESM2_CONFIG))
    return in_torch_file(folder, tensors, name="pytorch_model.bin").parent


def in_shards(folder: Path, tensors: Tensors, suffix: str) -> Path:
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    weight_map = {}
    for i, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"{stem}-{i + 1:05d}-of-00002.{suffix}"
        content = {name: tensors[name].clone() for name in part}
        save_file(content, folder / file) if suffix == "safetensors" else torch.save(content, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "config.json").write_text(json.dumps(ESM2_CONFIG))
    (folder / f"{stem}.{suffix}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def by_transformers(folder: Path, name: str, tensors: Tensors, max_shard_size: str = "1GB") -> Path:
    import transformers

    model = getattr(transformers, name)(transformers.EsmConfig(**ESM2_CONFIG))
    own = model.state_dict()
    model.load_state_dict(own | {key: value for key, value in tensors.items() if key in own})
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


ESM2_LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "fair-esm": in_fair_esm_file,
    "fair-esm's state dict": lambda folder: in_torch_file(folder, fair_esm()),
    "before torch 1.6": lambda folder: in_torch_file(folder, fair_esm(), zipped=False),
    "EsmModel": lambda folder: in_folder(folder, esm_model()),
    "EsmForMaskedLM": lambda folder: in_folder(folder, masked_lm()),
    "one file of a folder": lambda folder: in_folder(folder, masked_lm()) / "model.safetensors",
    "bin": lambda folder: in_bin_folder(folder, masked_lm()),
    "safetensors in shards": lambda folder: in_shards(folder, masked_lm(), "safetensors"),
    "bin in shards": lambda folder: in_shards(folder, masked_lm(), "bin"),
    "transformers, masked": lambda folder: by_transformers(folder, "EsmForMaskedLM", masked_lm()),
    "transformers, in shards": lambda folder: by_transformers(folder, "EsmModel", esm_model(), "8KB"),
}


def shapes_of(state: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


@pytest.mark.parametrize("layout", ESM2_LAYOUTS)
def test_every_esm2_layout_gives_the_same_tensors(layout: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(ESM2_LAYOUTS[layout](tmp_path)), None)
    assert checkpoint.family == "esm2"
    assert checkpoint.spec == ESM2_SPEC
    state, theirs = checkpoint.state_dict(), esm_model()
    assert shapes_of(state) == parameter_shapes(ESM2_SPEC)
    expected = {
        "embed_tokens": "embeddings.word_embeddings",
        "final_norm": "encoder.emb_layer_norm_after",
        "layers.1.attention_norm": "encoder.layer.1.attention.LayerNorm",
        "layers.0.attention_out": "encoder.layer.0.attention.output.dense",
        "layers.1.ffn_norm": "encoder.layer.1.LayerNorm",
        "layers.0.ffn_in": "encoder.layer.0.intermediate.dense",
        "layers.1.ffn_out": "encoder.layer.1.output.dense",
    }
    attention = "encoder.layer.1.attention.self"
    for leaf in ("weight", "bias"):
        for ours, name in expected.items():
            if f"{name}.{leaf}" in theirs:
                assert torch.equal(state[f"{ours}.{leaf}"], theirs[f"{name}.{leaf}"]), ours
        parts = [theirs[f"{attention}.{part}.{leaf}"] for part in ("query", "key", "value")]
        assert torch.equal(state[f"layers.1.qkv.{leaf}"], pair_rows(torch.cat(parts), ESM2_SPEC.num_heads))


def test_a_checkpoint_is_found_again_by_its_location(tmp_path: Path) -> None:
    for name, family in ((str(in_folder(tmp_path, esm_model())), "esm2"), ("random:DNABERT-S", None)):
        checkpoint = open_checkpoint(name, family)
        assert open_checkpoint(str(checkpoint.location), checkpoint.family) == checkpoint


def dnabert_2(folder: Path) -> Path:
    tensors = load_file(GOLDEN / "dnabert_s" / "model.safetensors")
    prefixed = {f"bert.{key}": value for key, value in tensors.items()}
    head = {"cls.predictions.bias": torch.zeros(4096), "cls.predictions.decoder.bias": torch.zeros(4096)}
    torch.save(prefixed | head, folder / "pytorch_model.bin")
    shutil.copyfile(GOLDEN / "dnabert_s" / "config.json", folder / "config.json")
    return folder


def test_dnabert_s_and_dnabert_2_give_the_same_tensors(tmp_path: Path) -> None:
    published = load_file(GOLDEN / "dnabert_s" / "model.safetensors")
    for path in (GOLDEN / "dnabert_s", dnabert_2(tmp_path)):
        checkpoint = open_checkpoint(str(path), None)
        spec = checkpoint.spec
        assert checkpoint.family == spec.family == "dnabert_s"
        assert (spec.num_layers, spec.embedding_dim, spec.num_heads, spec.ffn_dim) == (3, 96, 12, 384)
        assert (spec.vocab_size, spec.layer_norm_eps) == (4096, 1e-12)
        state = checkpoint.state_dict()
        assert shapes_of(state) == parameter_shapes(spec)
        for ours, theirs in {
            "layers.2.qkv.weight": "encoder.layer.2.attention.self.Wqkv.weight",
            "layers.2.attention_norm.weight": "encoder.layer.2.attention.output.LayerNorm.weight",
            "layers.0.ffn_in.weight": "encoder.layer.0.mlp.gated_layers.weight",
            "layers.2.ffn_norm.bias": "encoder.layer.2.mlp.layernorm.bias",
        }.items():
            assert torch.equal(state[ours], published[theirs])
        token_types = published["embeddings.token_type_embeddings.weight"]
        assert torch.equal(state["token_type_embedding"], token_types[0])


def test_the_fingerprint_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = dnabert_2(tmp_path)
    without = open_checkpoint(str(folder), None)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json beside .*pytorch_model\.bin"):
        str(without.tokenizer_path)
    (folder / "tokenizer.json").write_text("{}")
    found = open_checkpoint(str(folder), None)
    assert found.tokenizer_path == folder / "tokenizer.json"
    golden = open_checkpoint(str(GOLDEN / "dnabert_s"), None)
    assert len({without.fingerprint, found.fingerprint, golden.fingerprint}) == 3
    assert open_checkpoint(str(folder), None).fingerprint == found.fingerprint


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path), None).state_dict()


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(tmp_path: Path) -> None:
    vocabulary = {name: i for i, name in enumerate(["[UNK]", "[CLS]", "[SEP]", *map(str, range(5000))])}
    path = dnabert_2(tmp_path) / "tokenizer.json"
    make_tokenizer(path)
    tokenizer = json.loads(path.read_text())
    tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    path.write_text(json.dumps(tokenizer))
    refused(tmp_path, "its tokenizer has 500[0-9] entries and its embedding 4096")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder.layer.1.output.dense.bias": None}, r"lacks tensors: encoder.layer.1.output.dense.bias\."),
        ({"adapter.weight": torch.zeros(2)}, r"has unknown tensors: adapter\.weight"),
        (
            {"encoder.layer.0.output.dense.weight": torch.zeros(24, 23)},
            r"has misshapen tensors: encoder.layer.0.output.dense.weight \(24, 23\)",
        ),
        ({f"x{i}": torch.zeros(1) for i in range(9)}, r"x0, x1, x2, x3, x4 and 4 more"),
    ],
)
def test_tensors_that_do_not_belong_are_named(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in (esm_model() | changes).items() if tensor is not None}
    refused(in_folder(tmp_path, tensors), message)


CONTRADICTION = r"contradicts itself: \w+ is {} in its configuration and \d+ in its weights"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, CONTRADICTION.format(3)),
        ({"hidden_size": 48}, CONTRADICTION.format(48)),
        ({"intermediate_size": 41}, CONTRADICTION.format(41)),
        ({"vocab_size": 34}, CONTRADICTION.format(34)),
        ({"num_attention_heads": None}, "has no number for num_attention_heads"),
        ({"layer_norm_eps": "1e-5"}, "has no number for layer_norm_eps"),
        ({"num_attention_heads": 5}, "width 24 is not a multiple of 5 heads"),
        ({"num_attention_heads": 8}, "heads of even width, not 3"),
        ({"position_embedding_type": "absolute"}, "another model than ESM-2"),
        ({"emb_layer_norm_before": True}, "another model than ESM-2"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    refused(in_folder(tmp_path, esm_model(), **changes), message)


def test_what_the_weights_do_not_say_is_refused(tmp_path: Path) -> None:
    refused(
        in_fair_esm_file(tmp_path, encoder_attention_heads=6),
        "num_heads is 6 in its configuration and 3 in its weights",
    )
    bare = {key: value for key, value in fair_esm().items() if "rot_emb" not in key}
    refused(in_torch_file(tmp_path, bare), "does not say how many heads")
    small = esm_model() | {"embeddings.word_embeddings.weight": torch.zeros(30, 24)}
    refused(in_folder(tmp_path, small, vocab_size=30), "vocabulary of 30 is smaller")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, r"config\.json cannot be read")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, r"has no config\.json beside")


def test_a_file_of_something_else_or_a_missing_one_is_named(tmp_path: Path) -> None:
    refused(tmp_path, r"holds no model\.safetensors or pytorch_model\.bin")
    save_file({"roberta.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, r"holds neither ESM-2 nor DNABERT-S weights \(first tensors: roberta\.weight\)")
    with pytest.raises(CheckpointError, match="holds a DNABERT-S model where an ESM-2 model is needed"):
        open_checkpoint(str(GOLDEN / "dnabert_s"), "esm2")
    shards = tmp_path / "shards"
    shards.mkdir()
    in_shards(shards, masked_lm(), "safetensors")
    (shards / "model-00002-of-00002.safetensors").unlink()
    refused(shards, r"lacks the weight shards model-00002-of-00002\.safetensors")
    for content, message in (
        ([1], "holds no state dict"),
        ({}, "no state dict"),
        ({"a": 1}, "more than tensors"),
    ):
        torch.save(content, tmp_path / "a.pt")
        refused(tmp_path / "a.pt", message)


OUTSIDE = ("../dnabert/model.safetensors", "/etc/passwd", "a\0", "x" * 5000, "", 3, None, "\x1b[2J")


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"weight_map": 1}', "{}", *(json.dumps({"weight_map": {"a": name}}) for name in OUTSIDE)],
)
def test_an_index_names_files_beside_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "is not an index of weight shards")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("layout", ["fair-esm", "before torch 1.6", "one file of a folder"])
def test_a_truncated_file_is_refused(layout: str, share: float, tmp_path: Path) -> None:
    path = ESM2_LAYOUTS[layout](tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path, "cannot be read as .*truncated")


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    make_models(tmp_path)
    for name in ("esm2", "dnabert"):
        open_checkpoint(str(tmp_path / name), None).state_dict()
    return tmp_path


@pytest.mark.parametrize("name", hostile_json("num_hidden_layers"))
def test_hostile_configs(name: str, valid: Path) -> None:
    (valid / "esm2" / "config.json").write_bytes(hostile_json("num_hidden_layers")[name])
    refused(valid / "esm2", r"\S")


@pytest.mark.parametrize("value", [0, -2, 2.5, 1e999, float("nan"), 10**400, True, "2", [2], None, 1 << 40])
@pytest.mark.parametrize("field", ["num_attention_heads", "layer_norm_eps", "intermediate_size"])
def test_numbers_that_no_model_has(field: str, value: object, valid: Path) -> None:
    path = valid / "dnabert" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(valid / "dnabert", field)


@pytest.mark.parametrize("name", safetensors_headers())
def test_hostile_safetensors(name: str, valid: Path) -> None:
    (valid / "dnabert" / "model.safetensors").write_bytes(safetensors_headers()[name])
    refused(valid / "dnabert", r"\A[^\x1b]*\Z")


# Names, and weights drawn at random.


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("esm2:8M", ("esm2", "8M")),
        ("dnabert:/a/b", ("dnabert_s", "/a/b")),
        ("dnabert:zhihan1996/DNABERT-S", ("dnabert_s", "zhihan1996/DNABERT-S")),
        ("random:650M", ("esm2", "random:650M")),
        ("dnabert:random:tiny", ("dnabert_s", "random:tiny")),
    ],
)
def test_family_of(model: str, expected: tuple[str, str]) -> None:
    assert family_of(model) == expected


@pytest.mark.parametrize(
    ("name", "family", "error", "message"),
    [
        ("7B", "esm2", CheckpointError, r"no model 7B: [^,]*, [^,]*, and not one of tiny, 8M, 35M, 150M"),
        ("7B", None, CheckpointError, r"one of tiny(?!.*tiny)"),
        ("tiny", None, UsageError, "give esm2:tiny or dnabert:tiny"),
        ("random:nonsense", "esm2", CheckpointError, r"random:nonsense is not .* one of tiny, 8M"),
        ("random:650M", "dnabert_s", CheckpointError, "random:650M"),
        ("random:tiny", None, UsageError, "esm2:random:tiny"),
    ],
)
def test_names_of_no_model_or_of_two(
    name: str, family: Family | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(name, family)


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_the_catalogue_has_the_architecture_of_the_bundled_files(family: Family) -> None:
    [entry] = find_entries("tiny", family)
    assert open_checkpoint("tiny", family).spec == entry.spec


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_random_weights_are_the_same_every_time(family: Family) -> None:
    checkpoint = open_checkpoint("random:tiny", family)
    first, second = (load_model(checkpoint, "cpu", "fp32").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0.01 < float(first["layers.0.ffn_out.weight"].std()) < 0.03
    assert abs(float(first["layers.0.ffn_norm.weight"].mean()) - 1) < 0.1
    other = {"esm2": "random:8M", "dnabert_s": "random:DNABERT-S"}[family]
    assert open_checkpoint(other, family).fingerprint != checkpoint.fingerprint
    if family == "dnabert_s":
        assert open_checkpoint(other, family).tokenizer.vocab_size == 4096
