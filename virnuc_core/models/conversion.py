"""Weights from any published form to safetensors, which hold tensors and nothing that could run.

A model becomes a folder as transformers writes it (config.json, model.safetensors, and for DNABERT-S its
tokenizer.json), a head one file. What was written is read again and compared, tensor by tensor.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import atomic_path, sync_file, sync_folder
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.checksums import write_sums
from virnuc_core.models.classifier import MLPClassifier, classifier_fingerprint, load_classifier
from virnuc_core.models.key_mapping import DNABERT, TRANSFORMERS_ESM
from virnuc_core.models.recognition import open_weights
from virnuc_core.models.weights import (
    Checkpoint,
    load_published,
    load_state_dict,
    read_spec,
    tokenizer_path,
    weights_fingerprint,
)
from virnuc_core.specs import ModelSpec

_METADATA: Final = {"format": "pt"}  # what transformers asks of a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What became of one file or folder.

    Attributes:
        kind: what it holds.
        source: the file or folder that was read.
        out: the file or folder that was written.
        fingerprint: SHA-256 (hex) that plans and runs know the new one by; it is of the files, so it is another.
    """

    kind: Literal["model", "head"]
    source: Path
    out: Path
    fingerprint: str


def convert(source: Path, out: Path) -> Conversion:
    """Writes the same weights as safetensors; the source stays as it is.

    Args:
        source: fair-esm `.pt`, folder of a published model, or a head in any published form.
        out: folder to make for a model, or `.safetensors` file for a head.

    Raises:
        CheckpointError: the source is damaged, or neither a model nor a head.
        UsageError: `out` exists, or is no name for what the source is.
        OSError: it cannot be written.
    """
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists already: give the name of a new one.")
    if not out.absolute().parent.is_dir():
        raise UsageError(
            f"--out {out}: there is no folder {out.absolute().parent}. Make it, or choose another."
        )
    weights = open_weights(source)
    if isinstance(weights, MLPClassifier):
        return _convert_head(source, weights, out)
    return _convert_model(source, weights, out)


def _convert_head(source: Path, head: MLPClassifier, out: Path) -> Conversion:
    if out.suffix != ".safetensors":
        raise UsageError(
            f"--out {out}: {source} is a head, so give a file, {out.with_suffix('.safetensors')}."
        )
    state = head.state_dict()
    with atomic_path(out) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()}, temporary, metadata=_METADATA
        )
    _require_same(source, state, load_classifier(out).state_dict())
    return Conversion(kind="head", source=source, out=out, fingerprint=classifier_fingerprint(out))


def _convert_model(source: Path, checkpoint: Checkpoint, out: Path) -> Conversion:
    if out.suffix in (".safetensors", ".pt", ".bin"):
        raise UsageError(f"--out {out}: {source} is a model, so give the name of a folder.")
    spec, parts_of = load_published(checkpoint)
    with TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        save_file(_published_tensors(spec, parts_of), folder / "model.safetensors", metadata=_METADATA)
        if checkpoint.config is not None:
            shutil.copyfile(checkpoint.config, folder / "config.json")
        else:
            config = _esm2_config(spec, parts_of["final_norm.weight"][0].dtype)
            (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if checkpoint.family == "dnabert_s":
            shutil.copyfile(tokenizer_path(checkpoint), folder / "tokenizer.json")
        written = resolve_checkpoint(str(folder), checkpoint.family)
        if read_spec(written) != spec:
            raise CheckpointError(
                f"{source} could not be converted: what was written is another architecture."
            )
        _require_same(source, load_state_dict(checkpoint), load_state_dict(written))
        fingerprint = weights_fingerprint(written)
        write_sums(folder, sorted(folder.iterdir()))
        for path in folder.iterdir():
            sync_file(path)
        os.replace(folder, out)
    sync_folder(out.absolute().parent)
    return Conversion(kind="model", source=source, out=out, fingerprint=fingerprint)


def _published_tensors(spec: ModelSpec, parts_of: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """The tensors that virnuc needs, under the names that transformers gives them, as they are in the source."""
    layout = TRANSFORMERS_ESM if spec.family == "esm2" else DNABERT
    return {
        theirs: tensor.contiguous()
        for name, parts in parts_of.items()
        for theirs, tensor in zip(layout.sources(name), parts, strict=True)
    }


def _esm2_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers wants to know of an ESM-2 model that came without a config.json."""
    return {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.embedding_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.ffn_dim,
        "layer_norm_eps": spec.layer_norm_eps,
        "position_embedding_type": "rotary",
        "token_dropout": spec.token_dropout,
        "emb_layer_norm_before": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _require_same(source: Path, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Compares what was read with what was written.

    Raises:
        CheckpointError: they differ, which says that the disk or the memory is at fault.
    """
    same = before.keys() == after.keys()
    if not same or not all(
        tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
        for name, tensor in before.items()
    ):
        raise CheckpointError(
            f"{source} could not be converted: what was written does not read back the same."
        )
