"""Checkpoints in every published layout give the same tensors; broken ones give one clear error."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors
from torch import Tensor

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.models.checkpoint import parameter_shapes
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.models.positions import pair_rows
from virnuc_core.specs import ModelSpec

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


def linear(key: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    return {f"{key}.weight": torch.randn(outputs, inputs), f"{key}.bias": torch.randn(outputs)}


def norm(key: str, width: int) -> dict[str, Tensor]:
    return {f"{key}.weight": torch.randn(width), f"{key}.bias": torch.randn(width)}


def esm_model_tensors() -> dict[str, Tensor]:
    """Random weights under the names of transformers' EsmModel."""
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


def as_masked_lm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in EsmForMaskedLM, with all that the published files carry besides."""
    prefixed = {f"esm.{key}": value for key, value in tensors.items()}
    return prefixed | {
        "lm_head.bias": torch.zeros(33),
        **linear("lm_head.dense", 24, 24),
        "esm.embeddings.position_embeddings.weight": torch.zeros(50, 24),
        "esm.embeddings.position_ids": torch.arange(50)[None],
        "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq": torch.zeros(4),
        "esm.contact_head.regression.weight": torch.zeros(1, 6),
    }


def as_fair_esm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of fair-esm's state dict."""
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
    for key, value in tensors.items():
        for theirs, ours in renames:
            key = key.replace(theirs, ours)
        renamed[key] = value
    frequencies = {f"layers.{n}.self_attn.rot_emb.inv_freq": torch.zeros(4) for n in range(2)}
    return renamed | frequencies | {"lm_head.weight": torch.zeros(33, 24)}


def fair_esm_file(path: Path, model: dict[str, Tensor], **arguments: object) -> None:
    given = {
        "encoder_layers": 2,
        "encoder_embed_dim": 24,
        "encoder_attention_heads": 3,
        "token_dropout": True,
    }
    cfg = {"model": argparse.Namespace(**(given | arguments))}
    torch.save({"args": argparse.Namespace(arch="esm2"), "cfg": cfg, "model": model}, path)


def write_shards(folder: Path, tensors: dict[str, Tensor], suffix: str) -> None:
    names = sorted(tensors)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"{stem}-{i + 1:05d}-of-00002.{suffix}"
        content = {name: tensors[name].clone() for name in part}
        if suffix == "bin":
            torch.save(content, folder / file)
        else:
            save_file(content, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(ESM2_CONFIG | changes))


def make_fair_esm(folder: Path) -> Path:
    model = {f"encoder.sentence_encoder.{k}": v for k, v in as_fair_esm(esm_model_tensors()).items()}
    fair_esm_file(folder / "esm2.pt", model)
    return folder / "esm2.pt"


def make_fair_esm_state_dict(folder: Path) -> Path:
    torch.save(as_fair_esm(esm_model_tensors()), folder / "weights.pt")
    return folder / "weights.pt"


def make_fair_esm_before_zip(folder: Path) -> Path:
    path = folder / "old.pt"
    torch.save(as_fair_esm(esm_model_tensors()), path, _use_new_zipfile_serialization=False)
    return path


def make_esm_model(folder: Path) -> Path:
    write_config(folder)
    save_file(esm_model_tensors(), folder / "model.safetensors")
    return folder


def make_masked_lm(folder: Path) -> Path:
    write_config(folder)
    save_file(as_masked_lm(esm_model_tensors()), folder / "model.safetensors")
    return folder


def make_one_file_of_a_folder(folder: Path) -> Path:
    return make_masked_lm(folder) / "model.safetensors"


def make_masked_lm_bin(folder: Path) -> Path:
    write_config(folder)
    torch.save(as_masked_lm(esm_model_tensors()), folder / "pytorch_model.bin")
    return folder


def make_sharded_safetensors(folder: Path) -> Path:
    write_config(folder)
    write_shards(folder, as_masked_lm(esm_model_tensors()), "safetensors")
    return folder


def make_sharded_bin(folder: Path) -> Path:
    write_config(folder)
    write_shards(folder, as_masked_lm(esm_model_tensors()), "bin")
    return folder


def make_by_transformers(folder: Path) -> Path:
    return save_with_transformers(folder, "EsmModel", esm_model_tensors())


def make_by_transformers_masked_lm(folder: Path) -> Path:
    tensors = as_masked_lm(esm_model_tensors())
    return save_with_transformers(folder, "EsmForMaskedLM", tensors)


def make_by_transformers_sharded(folder: Path) -> Path:
    return save_with_transformers(folder, "EsmModel", esm_model_tensors(), max_shard_size="8KB")


def save_with_transformers(
    folder: Path, name: str, tensors: dict[str, Tensor], max_shard_size: str = "1GB"
) -> Path:
    import transformers

    model = getattr(transformers, name)(transformers.EsmConfig(**ESM2_CONFIG))
    own = model.state_dict()
    model.load_state_dict(own | {key: value for key, value in tensors.items() if key in own})
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


ESM2_LAYOUTS = [
    make_fair_esm,
    make_fair_esm_state_dict,
    make_fair_esm_before_zip,
    make_esm_model,
    make_masked_lm,
    make_one_file_of_a_folder,
    make_masked_lm_bin,
    make_sharded_safetensors,
    make_sharded_bin,
    make_by_transformers,
    make_by_transformers_masked_lm,
    make_by_transformers_sharded,
]


@pytest.mark.parametrize("make", ESM2_LAYOUTS)
def test_every_esm2_layout_gives_the_same_tensors(make: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make(tmp_path)), None)
    assert checkpoint.family == "esm2"
    assert checkpoint.spec == ESM2_SPEC
    state, theirs = checkpoint.state_dict(), esm_model_tensors()
    assert {name: tuple(value.shape) for name, value in state.items()} == parameter_shapes(ESM2_SPEC)
    expected = {
        "embed_tokens": "embeddings.word_embeddings",
        "final_norm": "encoder.emb_layer_norm_after",
        "layers.1.attention_norm": "encoder.layer.1.attention.LayerNorm",
        "layers.0.attention_out": "encoder.layer.0.attention.output.dense",
        "layers.1.ffn_norm": "encoder.layer.1.LayerNorm",
        "layers.0.ffn_in": "encoder.layer.0.intermediate.dense",
        "layers.1.ffn_out": "encoder.layer.1.output.dense",
    }
    for ours, name in expected.items():
        for leaf in ("weight", "bias"):
            if f"{name}.{leaf}" in theirs:
                assert torch.equal(state[f"{ours}.{leaf}"], theirs[f"{name}.{leaf}"]), ours
    for leaf in ("weight", "bias"):
        parts = [
            theirs[f"encoder.layer.1.attention.self.{part}.{leaf}"] for part in ("query", "key", "value")
        ]
        assert torch.equal(state[f"layers.1.qkv.{leaf}"], pair_rows(torch.cat(parts), ESM2_SPEC.num_heads))


def test_a_checkpoint_is_found_again_by_its_location(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_esm_model(tmp_path)), "esm2")
    assert open_checkpoint(str(checkpoint.location), "esm2") == checkpoint
    assert checkpoint.name == tmp_path.name


def test_the_golden_fair_esm_file() -> None:
    checkpoint = open_checkpoint(str(GOLDEN / "esm2" / "esm2_t4_made.pt"), "esm2")
    spec = checkpoint.spec
    assert (spec.num_layers, spec.embedding_dim, spec.num_heads, spec.ffn_dim) == (4, 96, 6, 384)
    shapes = {name: tuple(value.shape) for name, value in checkpoint.state_dict().items()}
    assert shapes == parameter_shapes(spec)


def make_dnabert_2(folder: Path) -> Path:
    tensors = load_file(GOLDEN / "dnabert_s" / "model.safetensors")
    prefixed = {f"bert.{key}": value for key, value in tensors.items()}
    head = {"cls.predictions.bias": torch.zeros(4096), "cls.predictions.decoder.bias": torch.zeros(4096)}
    torch.save(prefixed | head, folder / "pytorch_model.bin")
    shutil.copyfile(GOLDEN / "dnabert_s" / "config.json", folder / "config.json")
    return folder


def test_dnabert_s_and_dnabert_2_give_the_same_tensors(tmp_path: Path) -> None:
    published = load_file(GOLDEN / "dnabert_s" / "model.safetensors")
    for path in (GOLDEN / "dnabert_s", make_dnabert_2(tmp_path)):
        checkpoint = open_checkpoint(str(path), None)
        spec = checkpoint.spec
        assert checkpoint.family == spec.family == "dnabert_s"
        assert (spec.num_layers, spec.embedding_dim, spec.num_heads, spec.ffn_dim) == (3, 96, 12, 384)
        assert (spec.vocab_size, spec.layer_norm_eps) == (4096, 1e-12)
        state = checkpoint.state_dict()
        assert {name: tuple(value.shape) for name, value in state.items()} == parameter_shapes(spec)
        for ours, theirs in {
            "embedding_norm": "embeddings.LayerNorm",
            "layers.2.qkv": "encoder.layer.2.attention.self.Wqkv",
            "layers.2.attention_out": "encoder.layer.2.attention.output.dense",
            "layers.2.attention_norm": "encoder.layer.2.attention.output.LayerNorm",
            "layers.2.ffn_out": "encoder.layer.2.mlp.wo",
            "layers.2.ffn_norm": "encoder.layer.2.mlp.layernorm",
        }.items():
            assert torch.equal(state[f"{ours}.weight"], published[f"{theirs}.weight"])
            assert torch.equal(state[f"{ours}.bias"], published[f"{theirs}.bias"])
        token_types = published["embeddings.token_type_embeddings.weight"]
        assert torch.equal(state["token_type_embedding"], token_types[0])
        gated = published["encoder.layer.0.mlp.gated_layers.weight"]
        assert torch.equal(state["layers.0.ffn_in.weight"], gated)


def test_the_fingerprint_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = make_dnabert_2(tmp_path)
    without = open_checkpoint(str(folder), None).fingerprint
    (folder / "tokenizer.json").write_text("{}")
    with_tokenizer = open_checkpoint(str(folder), None).fingerprint
    golden = open_checkpoint(str(GOLDEN / "dnabert_s"), None).fingerprint
    assert len({without, with_tokenizer, golden}) == 3
    assert open_checkpoint(str(folder), None).fingerprint == with_tokenizer


def test_the_tokenizer_is_beside_the_weights(tmp_path: Path) -> None:
    folder = make_dnabert_2(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json beside .*pytorch_model\.bin"):
        str(open_checkpoint(str(folder), None).tokenizer_path)
    (folder / "tokenizer.json").write_text("{}")
    assert open_checkpoint(str(folder), None).tokenizer_path == folder / "tokenizer.json"


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(tmp_path: Path) -> None:
    vocabulary = {name: i for i, name in enumerate(["[UNK]", "[CLS]", "[SEP]", *map(str, range(5000))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(make_dnabert_2(tmp_path) / "tokenizer.json"))
    refused(tmp_path, "its tokenizer has 5003 entries and its embedding 4096")


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path), None).state_dict()


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    tensors = esm_model_tensors()
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, r"lacks tensors: encoder\.layer\.1\.output\.dense\.bias\.")


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file(esm_model_tensors() | {"adapter.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    refused(tmp_path, r"has unknown tensors: adapter\.weight")


def test_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    changed = esm_model_tensors() | {"encoder.layer.0.attention.self.key.weight": torch.zeros(24, 23)}
    save_file(changed, tmp_path / "model.safetensors")
    refused(tmp_path, r"has misshapen tensors: encoder\.layer\.0\.attention\.self\.key\.weight \(24, 23\)")


def test_long_lists_of_tensors_are_cut(tmp_path: Path) -> None:
    write_config(tmp_path)
    extra = {f"x{i}": torch.zeros(1) for i in range(9)}
    save_file(esm_model_tensors() | extra, tmp_path / "model.safetensors")
    refused(tmp_path, r"x0, x1, x2, x3, x4 and 4 more")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 3), ("hidden_size", 48), ("intermediate_size", 41), ("vocab_size", 34)],
)
def test_a_config_that_contradicts_the_weights_is_refused(field: str, value: int, tmp_path: Path) -> None:
    make_esm_model(tmp_path)
    write_config(tmp_path, **{field: value})
    refused(tmp_path, rf"contradicts itself: \w+ is {value} in its configuration and \d+ in its weights")


def test_fair_esm_arguments_that_contradict_the_weights_are_refused(tmp_path: Path) -> None:
    fair_esm_file(tmp_path / "a.pt", as_fair_esm(esm_model_tensors()), encoder_attention_heads=6)
    refused(tmp_path / "a.pt", "num_heads is 6 in its configuration and 3 in its weights")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": None}, "has no number for num_attention_heads"),
        ({"layer_norm_eps": "1e-5"}, "has no number for layer_norm_eps"),
        ({"num_attention_heads": 5}, "width 24 is not a multiple of 5 heads"),
        ({"num_attention_heads": 8}, "heads of even width, not 3"),
        ({"position_embedding_type": "absolute"}, "another model than ESM-2"),
        ({"emb_layer_norm_before": True}, "another model than ESM-2"),
    ],
)
def test_a_config_of_no_esm2_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    make_esm_model(tmp_path)
    write_config(tmp_path, **changes)
    refused(tmp_path, message)


def test_a_missing_or_damaged_config_is_refused(tmp_path: Path) -> None:
    make_esm_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, r"config\.json cannot be read")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, r"has no config\.json beside")


def test_a_state_dict_that_does_not_say_its_heads_is_refused(tmp_path: Path) -> None:
    bare = {key: value for key, value in as_fair_esm(esm_model_tensors()).items() if "rot_emb" not in key}
    torch.save(bare, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "does not say how many heads")


def test_too_small_an_alphabet_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, vocab_size=30)
    small = esm_model_tensors() | {"embeddings.word_embeddings.weight": torch.zeros(30, 24)}
    save_file(small, tmp_path / "model.safetensors")
    refused(tmp_path, "vocabulary of 30 is smaller")


def test_other_models_are_refused(tmp_path: Path) -> None:
    save_file({"roberta.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, r"holds neither ESM-2 nor DNABERT-S weights \(first tensors: roberta\.weight\)")


def test_a_model_of_the_other_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="holds a DNABERT-S model where an ESM-2 model is needed"):
        open_checkpoint(str(GOLDEN / "dnabert_s"), "esm2")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, r"holds no model\.safetensors or pytorch_model\.bin")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_sharded_safetensors(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, r"lacks the weight shards model-00002-of-00002\.safetensors")


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 1}', "{}"])
def test_a_damaged_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "is not an index of weight shards")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("make", [make_fair_esm, make_fair_esm_before_zip, make_one_file_of_a_folder])
def test_a_truncated_file_is_refused(make: Callable[[Path], Path], share: float, tmp_path: Path) -> None:
    path = make(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path, "cannot be read as .*truncated")


class Evil:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    torch.save({"model": as_fair_esm(esm_model_tensors()), "x": Evil(tmp_path / "ran")}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "which could run code, so it is not loaded")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [([1], "holds no state dict"), ({}, "no state dict"), ({"a": 1}, "more than tensors")],
)
def test_files_of_something_else_are_refused(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", message)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"there is no model 7B: .* tiny, 8M, 35M, 150M, 650M, 3B, 15B"):
        open_checkpoint("7B", "esm2")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("7B", None)
    assert str(caught.value).count("tiny") == 1


def test_a_name_of_both_families_needs_a_family() -> None:
    with pytest.raises(UsageError, match="give esm2:tiny or dnabert:tiny"):
        open_checkpoint("tiny", None)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("class_name", ["EsmModel", "EsmForMaskedLM"])
def test_a_state_dict_of_the_installed_transformers(class_name: str, sharded: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.EsmConfig(**ESM2_CONFIG)
    published = getattr(transformers, class_name)(config).state_dict()
    config.save_pretrained(tmp_path)
    if sharded:
        write_shards(tmp_path, published, "bin")
    else:
        torch.save(published, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(tmp_path), "esm2")
    found = checkpoint.state_dict()
    assert found.keys() == parameter_shapes(checkpoint.spec).keys()
    prefix = "" if class_name == "EsmModel" else "esm."
    assert torch.equal(found["embed_tokens.weight"], published[f"{prefix}embeddings.word_embeddings.weight"])
