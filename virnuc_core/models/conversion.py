"""Converts weights of any published form to safetensors, which hold tensors and nothing executable."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import atomic_path
from virnuc_core.models.checkpoint import DNABERT, TRANSFORMERS_ESM, Checkpoint, config_sizes
from virnuc_core.models.classifier import classifier_fingerprint, load_classifier
from virnuc_core.models.contig_head import ContigHead
from virnuc_core.models.hub import new_folder, open_weights

_METADATA: Final = {"format": "pt"}  # required by transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """One converted file or folder; `fingerprint` (SHA-256, hex) is that of the new files, not of the source."""

    kind: Literal["model", "head"]
    source: Path
    out: Path
    fingerprint: str


def convert(source: Path, out: Path) -> Conversion:
    """Writes the same weights as safetensors and verifies them by reading them back; the source is left alone.

    A model becomes a folder in transformers' layout (config.json, model.safetensors, for DNABERT-S also
    tokenizer.json), a head one `.safetensors` file.

    Raises:
        CheckpointError: the source is damaged, or neither a model nor a head.
        UsageError: `out` exists, its parent does not, or its name does not suit a model or a head.
        OSError: it cannot be written.
    """
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists already: give the name of a new one.")
    if not out.absolute().parent.is_dir():
        raise UsageError(
            f"--out {out}: there is no folder {out.absolute().parent}. Make it, or choose another."
        )
    weights = open_weights(source)
    if isinstance(weights, Checkpoint):
        return Conversion(
            kind="model", source=source, out=out, fingerprint=_convert_model(source, weights, out)
        )
    if isinstance(weights, ContigHead):
        raise UsageError(f"{source} is safetensors already: copy the file.")
    if out.suffix != ".safetensors":
        raise UsageError(
            f"--out {out}: {source} is a head, so give a file, {out.with_suffix('.safetensors')}."
        )
    state = weights.state_dict()
    with atomic_path(out) as temporary:
        save_file({name: part.contiguous() for name, part in state.items()}, temporary, metadata=_METADATA)
    _require_same(source, state, load_classifier(out).state_dict())
    return Conversion(kind="head", source=source, out=out, fingerprint=classifier_fingerprint(out))


def _convert_model(source: Path, checkpoint: Checkpoint, out: Path) -> str:
    if out.suffix in (".safetensors", ".pt", ".bin"):
        raise UsageError(f"--out {out}: {source} is a model, so give the name of a folder.")
    layout = TRANSFORMERS_ESM if checkpoint.family == "esm2" else DNABERT
    tensors = {
        theirs: tensor.contiguous()
        for name, parts in checkpoint.published_parts().items()
        for theirs, tensor in zip(layout.sources(name), parts, strict=True)
    }
    with new_folder(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata=_METADATA)
        if checkpoint.config is not None:
            shutil.copyfile(checkpoint.config, folder / "config.json")
        else:
            dtype = tensors[layout.sources("final_norm.weight")[0]].dtype
            (folder / "config.json").write_text(json.dumps(_esm2_config(checkpoint, dtype), indent=1) + "\n")
        if checkpoint.family == "dnabert_s":
            shutil.copyfile(checkpoint.tokenizer_path, folder / "tokenizer.json")
        written = Checkpoint.open(folder, checkpoint.family)
        if written.spec != checkpoint.spec:
            raise CheckpointError(
                f"{source} could not be converted: what was written is another architecture."
            )
        _require_same(source, checkpoint.state_dict(), written.state_dict())
        return written.fingerprint


def _esm2_config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that transformers needs, for an ESM-2 model that came without one."""
    spec = checkpoint.spec
    return {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        **config_sizes(spec),
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
    same = before.keys() == after.keys()
    if not same or not all(
        tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
        for name, tensor in before.items()
    ):
        raise CheckpointError(
            f"{source} could not be converted: what was written does not read back the same."
        )
