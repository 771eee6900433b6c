"""Checkpoints in every published layout give the same tensors; broken and hostile ones give one clear error."""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM

from tests.made_hostile import hostile_json, safetensors_headers
from tests.made_models import ESM2, GOLDEN, make_spec, make_tokenizer, published_config, write_model
from virnuc_core.errors import CheckpointError
from virnuc_core.models.checkpoint import parameter_shapes, random_state_dict, read_weights
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family

Tensors = dict[str, Tensor]


def state_of(path: Path | str, family: Family | None = None) -> Tensors:
    return read_weights(open_checkpoint(str(path), family), "cpu", torch.float32)


SPEC = make_spec("esm2", num_heads=3, ffn_dim=40)
CONFIG = published_config(SPEC) | {
    "emb_layer_norm_before": False,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "max_position_embeddings": 50,
}
IN_FAIR_ESM = {
    "embeddings.word_embeddings": "embed_tokens",
    "encoder.emb_layer_norm_after": "emb_layer_norm_after",
    "encoder.layer.": "layers.",
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "LayerNorm": "final_layer_norm",
}


@cache
def masked_lm() -> Tensors:
    """Random numbers for EsmForMaskedLM, and what its older files hold."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in EsmForMaskedLM(EsmConfig(**CONFIG)).state_dict().items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | {
        "esm.embeddings.position_embeddings.weight": torch.zeros(50, 24),
        "esm.embeddings.position_ids": torch.arange(50)[None],
        "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq": torch.zeros(4),
        "esm.contact_head.regression.weight": torch.zeros(1, 6),
    }


def published() -> Tensors:
    """EsmModel."""
    used = re.compile(r"esm\.(embeddings\.word|encoder\.(?!.*inv_freq))")
    return {name.removeprefix("esm."): rows for name, rows in masked_lm().items() if used.match(name)}


def fair_esm(prefix: str = "") -> Tensors:
    tensors = {}
    for name, rows in published().items():
        for theirs, fair in IN_FAIR_ESM.items():
            name = name.replace(theirs, fair)
        tensors[prefix + name] = rows
    frequencies = {f"{prefix}layers.{n}.self_attn.rot_emb.inv_freq": torch.zeros(4) for n in range(2)}
    return tensors | frequencies | {f"{prefix}lm_head.weight": torch.zeros(33, 24)}


def in_fair_esm_file(folder: Path) -> Path:
    content = {
        "args": argparse.Namespace(arch="esm2"),
        "cfg": {"model": argparse.Namespace(encoder_layers=2)},
    }
    torch.save(content | {"model": fair_esm("encoder.sentence_encoder.")}, folder / "esm2.pt")
    return folder / "esm2.pt"


def in_torch_file(path: Path, tensors: object, zipped: bool = True) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    return path


def in_folder(folder: Path, tensors: Tensors, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def in_bin_files(folder: Path, num_files: int) -> Path:
    tensors = masked_lm()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if num_files == 1:
        return in_torch_file(folder / "pytorch_model.bin", tensors).parent
    weight_map = {name: f"pytorch_model-{i % num_files}.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


ESM2_LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "fair-esm": in_fair_esm_file,
    "fair-esm's state dict": lambda folder: in_torch_file(folder / "weights.pt", fair_esm()),
    "before torch 1.6": lambda folder: in_torch_file(folder / "weights.pt", fair_esm(), zipped=False),
    "EsmModel": lambda folder: in_folder(folder, published()),
    "one file of a folder": lambda folder: in_folder(folder, masked_lm()) / "model.safetensors",
    "bin": lambda folder: in_bin_files(folder, 1),
    "bin in shards": lambda folder: in_bin_files(folder, 2),
}


@pytest.mark.parametrize("layout", ESM2_LAYOUTS)
def test_every_esm2_layout_gives_the_same_tensors(layout: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(ESM2_LAYOUTS[layout](tmp_path)), None)
    assert (checkpoint.family, checkpoint.spec) == ("esm2", SPEC)
    (tmp_path / "expected").mkdir()
    expected = state_of(in_folder(tmp_path / "expected", published()))
    state = read_weights(checkpoint, "cpu", torch.float32)
    assert state.keys() == expected.keys() == parameter_shapes(SPEC).keys()
    assert [name for name, rows in expected.items() if not torch.equal(state[name], rows)] == []
    assert open_checkpoint(str(checkpoint.location), "esm2") == checkpoint


def dnabert_2(folder: Path) -> Path:
    tensors = load_file(GOLDEN / "dnabert_s" / "model.safetensors")
    prefixed = {f"bert.{key}": value for key, value in tensors.items()}
    head = {"cls.predictions.bias": torch.zeros(4096), "cls.predictions.decoder.bias": torch.zeros(4096)}
    torch.save(prefixed | head, folder / "pytorch_model.bin")
    shutil.copyfile(GOLDEN / "dnabert_s" / "config.json", folder / "config.json")
    return folder


def test_dnabert_s_and_dnabert_2_give_the_same_tensors(tmp_path: Path) -> None:
    published = load_file(GOLDEN / "dnabert_s" / "model.safetensors")
    spec = make_spec("dnabert_s", num_layers=3, embedding_dim=96, num_heads=12, ffn_dim=384, vocab_size=4096)
    without_tokenizer = open_checkpoint(str(dnabert_2(tmp_path)), None)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json next to .*pytorch_model\.bin"):
        str(without_tokenizer.tokenizer)
    for path in (GOLDEN / "dnabert_s", tmp_path):
        checkpoint = open_checkpoint(str(path), None)
        assert (checkpoint.family, checkpoint.spec) == ("dnabert_s", spec)
        state = state_of(path)
        assert {name: tuple(value.shape) for name, value in state.items()} == parameter_shapes(spec)
        for ours, theirs in {
            "layers.2.qkv.weight": "encoder.layer.2.attention.self.Wqkv.weight",
            "layers.2.attention_norm.weight": "encoder.layer.2.attention.output.LayerNorm.weight",
            "layers.0.ffn_in.weight": "encoder.layer.0.mlp.gated_layers.weight",
            "layers.2.ffn_norm.bias": "encoder.layer.2.mlp.layernorm.bias",
        }.items():
            assert torch.equal(state[ours], published[theirs])
        token_types = published["embeddings.token_type_embeddings.weight"]
        assert torch.equal(state["token_type_embedding"], token_types[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", [ESM2, GOLDEN / "dnabert_s"])
def test_weights_are_those_of_the_file(path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(str(path), None)
    state, parts = read_weights(checkpoint, "cpu", dtype), checkpoint.published_parts()
    assert state.keys() == parts.keys()
    for name, published in parts.items():
        assert torch.equal(state[name], checkpoint.assemble(name, published).to(dtype)), name
        assert state[name].is_contiguous(), name


@pytest.mark.parametrize("name", ["layers.1.qkv.bias", "layers.0.ffn_in.weight", "final_norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3.4e38])
def test_weights_that_are_not_finite(name: str, value: float, tmp_path: Path) -> None:
    path = in_folder(tmp_path, published())
    checkpoint = open_checkpoint(str(path), None)
    checkpoint.published_parts()[name][-1].view(-1)[-1] = value
    if value == 3.4e38:  # which bf16 rounds to infinity
        assert read_weights(checkpoint, "cpu", torch.bfloat16)[name].isinf().sum() == 1
        return
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=rf"is corrupt: {name} contains non-finite values"):
            read_weights(checkpoint, "cpu", dtype)


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_random_weights_are_the_same_every_time(family: Family) -> None:
    checkpoint = open_checkpoint("random:tiny", family)
    first, second = (random_state_dict(checkpoint.spec, "cpu", torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0.01 < float(first["layers.0.ffn_out.weight"].std()) < 0.03
    assert abs(float(first["layers.0.ffn_norm.weight"].mean()) - 1) < 0.1


# What is not such a checkpoint.


def refused(path: Path, message: str, family: Family | None = None) -> None:
    with pytest.raises(CheckpointError, match=message):
        state_of(path, family)


LEAF = "encoder.layer.1.output.dense.bias"
CONTRADICTION = r"is inconsistent: \w+ is {} in its configuration but \d+ in its weights"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({LEAF: None}, {}, rf"lacks tensors: {LEAF}\."),
        ({LEAF: torch.zeros(23)}, {}, rf"has misshapen tensors: {LEAF} \(23,\)"),
        ({"adapter.weight": torch.zeros(2)}, {}, r"has unknown tensors: adapter\.weight"),
        ({f"x{i}": torch.zeros(1) for i in range(9)}, {}, r"x0, x1, x2, x3, x4 and 4 more"),
        ({"embeddings.word_embeddings.weight": torch.zeros(30, 24)}, {"vocab_size": 30}, "30 is smaller"),
        ({}, {"num_hidden_layers": 3}, CONTRADICTION.format(3)),
        ({}, {"hidden_size": 48}, CONTRADICTION.format(48)),
        ({}, {"intermediate_size": 41}, CONTRADICTION.format(41)),
        ({}, {"vocab_size": 34}, CONTRADICTION.format(34)),
        ({}, {"num_attention_heads": None}, "num_heads: Input should be a valid integer"),
        ({}, {"layer_norm_eps": "1e-5"}, "layer_norm_eps: Input should be a valid number"),
        ({}, {"num_attention_heads": 5}, "width 24 is not a multiple of 5 heads"),
        ({}, {"num_attention_heads": 8}, "heads of even width, not 3"),
        ({}, {"position_embedding_type": "absolute"}, "does not describe an ESM-2 model"),
        ({}, {"emb_layer_norm_before": True}, "does not describe an ESM-2 model"),
    ],
)
def test_tensors_and_configuration_that_do_not_fit(
    tensors: dict[str, Tensor | None], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    changed = published() | tensors
    refused(in_folder(tmp_path, {k: v for k, v in changed.items() if v is not None}, **config), message)


def without(path: Path) -> Path:
    path.unlink()
    return path.parent


def with_content(path: Path, content: str) -> Path:
    path.write_text(content)
    return path.parent


def with_a_large_vocabulary(folder: Path) -> Path:
    path = dnabert_2(folder) / "tokenizer.json"
    make_tokenizer(path)
    tokenizer = json.loads(path.read_text())
    names = ["[UNK]", "[CLS]", "[SEP]", *map(str, range(5000))]
    tokenizer["model"] |= {"vocab": {name: i for i, name in enumerate(names)}, "merges": []}
    return with_content(path, json.dumps(tokenizer))


def without_frequencies() -> Tensors:
    return {key: value for key, value in fair_esm().items() if "rot_emb" not in key}


UNUSABLE: dict[str, Callable[[Path], Path]] = {
    "num_heads: Field required": lambda folder: in_torch_file(folder / "a.pt", without_frequencies()),
    "its tokenizer has 500[0-9] entries and its embedding 4096": with_a_large_vocabulary,
    r"config\.json cannot be read": lambda folder: with_content(
        in_folder(folder, masked_lm()) / "config.json", "{"
    ),
    r"config\.json cannot be read \(.*No such file": lambda folder: without(
        in_folder(folder, masked_lm()) / "config.json"
    ),
    r"contains no model\.safetensors or pytorch_model\.bin": lambda folder: folder,
    r"contains neither ESM-2 nor DNABERT-S weights \(first tensors: roberta\.weight\)": (
        lambda folder: in_folder(folder, {"roberta.weight": torch.zeros(1)})
    ),
    "contains a DNABERT-S model, but an ESM-2 model is needed": lambda folder: GOLDEN / "dnabert_s",
    r"lacks the weight shards pytorch_model-1\.bin": (
        lambda folder: without(in_bin_files(folder, 2) / "pytorch_model-1.bin")
    ),
    "contains no state dict": lambda folder: in_torch_file(folder / "a.pt", [1]),
    "no state dict": lambda folder: in_torch_file(folder / "a.pt", {}),
    "more than tensors": lambda folder: in_torch_file(folder / "a.pt", {"a": 1}),
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_files_that_are_no_model(message: str, tmp_path: Path) -> None:
    refused(UNUSABLE[message](tmp_path), message, "dnabert_s" if "tokenizer" in message else "esm2")


OUTSIDE = ("../dnabert/model.safetensors", "/etc/passwd", "a\0", "x" * 5000, "", 3, None, "\x1b[2J")


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"weight_map": 1}', "{}", *(json.dumps({"weight_map": {"a": name}}) for name in OUTSIDE)],
)
def test_an_index_names_files_beside_it(content: str, tmp_path: Path) -> None:
    refused(
        with_content(tmp_path / "model.safetensors.index.json", content), "is not an index of weight shards"
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("layout", ["fair-esm", "before torch 1.6", "one file of a folder"])
def test_a_truncated_file_is_refused(layout: str, share: float, tmp_path: Path) -> None:
    path = ESM2_LAYOUTS[layout](tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path, "cannot be read as .*truncated")


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", make_spec("dnabert_s"))
    state_of(folder)
    return folder


@pytest.mark.parametrize("name", hostile_json("num_hidden_layers"))
def test_hostile_configs(name: str, valid: Path) -> None:
    (valid / "config.json").write_bytes(hostile_json("num_hidden_layers")[name])
    refused(valid, r"\S")


@pytest.mark.parametrize("value", [0, -2, 2.5, 1e999, float("nan"), 10**400, True, "2", [2], None, 1 << 40])
@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ("num_attention_heads", "num_heads"),
        ("layer_norm_eps", "layer_norm_eps"),
        ("intermediate_size", "ffn_dim"),
    ],
)
def test_numbers_that_no_model_has(field: str, ours: str, value: object, valid: Path) -> None:
    path = valid / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(valid, f"{ours}|too large")


@pytest.mark.parametrize("name", safetensors_headers())
def test_hostile_safetensors(name: str, valid: Path) -> None:
    (valid / "model.safetensors").write_bytes(safetensors_headers()[name])
    refused(valid, r"\A[^\x1b]*\Z")
