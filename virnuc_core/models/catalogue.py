"""Models and heads with a short name: published ones, pinned to a commit, and bundled ones."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field
from safetensors import SafetensorError, safe_open

from virnuc_core.errors import CheckpointError, MismatchError, UsageError
from virnuc_core.files import from_json, parse_object
from virnuc_core.settings import RunConfig
from virnuc_core.specs import (
    FRAME_KINDS,
    FRAMES_IN_WORDS,
    ChunkRule,
    Family,
    FrameRule,
    ModelSpec,
    chunks_in_words,
)

RANDOM: Final = "random:"  # before a catalogue name: its architecture with weights drawn at random
HEAD_METADATA: Final = "virnuc_head"  # entry of a head's metadata, JSON: what it was trained for
NOT_CALIBRATED: Final = "is not calibrated: its scores rank sequences but are not probabilities"
_PREFIXES: Final[dict[str, Family]] = {"esm2": "esm2", "dnabert": "dnabert_s"}
_BUNDLED: Final = Path(__file__).parent / "bundled"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model known by name, unique within its family: at a commit of a repository on the model hub, or bundled.

    Attributes:
        repo: OWNER/NAME; like its `revision` empty for bundled models.
        licence: SPDX; empty if the repository states none.
    """

    name: str
    spec: ModelSpec
    repo: str
    revision: str
    licence: str

    @property
    def qualified_name(self) -> str:
        """The name with its family's prefix, as `embed` takes it."""
        return f"{'esm2' if self.spec.family == 'esm2' else 'dnabert'}:{self.name}"

    @property
    def bundled(self) -> Path | None:
        """The folder of a bundled model."""
        return None if self.repo else _BUNDLED / self.qualified_name.replace(":", "_")

    def is_called(self, name: str) -> bool:
        """Whether `name` is the short name, the repository, or the repository without its owner."""
        repo = self.repo or self.name
        names = (self.name, repo, repo.rpartition("/")[2])
        return name.casefold() in map(str.casefold, names)


def _esm2(name: str, num_layers: int, width: int, num_heads: int, revision: str = "") -> CatalogueEntry:
    """A model of facebook's, or the bundled one. Source: the config.json of each repository."""
    spec = ModelSpec(
        family="esm2",
        num_layers=num_layers,
        embedding_dim=width,
        num_heads=num_heads,
        ffn_dim=4 * width,
        vocab_size=33,
        layer_norm_eps=1e-5,
        token_dropout=True,
    )
    repo = f"facebook/esm2_t{num_layers}_{name}_UR50D" if revision else ""
    return CatalogueEntry(name, spec, repo, revision, "MIT")


# Source: the config.json of both repositories.
_DNABERT: Final = ModelSpec(
    family="dnabert_s",
    num_layers=12,
    embedding_dim=768,
    num_heads=12,
    ffn_dim=3072,
    vocab_size=4096,
    layer_norm_eps=1e-12,
)
_DNABERT_TINY: Final = replace(_DNABERT, num_layers=2, embedding_dim=256, num_heads=4, ffn_dim=512)
_DNABERT_S_COMMIT: Final = "00e47f96cdea35e4b6f5df89e5419cbe47d490c6"
_DNABERT_2_COMMIT: Final = "7bce263b15377fc15361f52cfab88f8b586abda0"
CATALOGUE: Final = (
    _esm2("tiny", 5, 256, 4),
    _esm2("8M", 6, 320, 20, "c731040fcd8d73dceaa04b0a8e6329b345b0f5df"),
    _esm2("35M", 12, 480, 20, "6fbf070e65b0b7291e7bbcd451118c216cff79d8"),
    _esm2("150M", 30, 640, 20, "a695f6045e2e32885fa60af20c13cb35398ce30c"),
    _esm2("650M", 33, 1280, 20, "08e4846e537177426273712802403f7ba8261b6c"),
    _esm2("3B", 36, 2560, 40, "476b639933c8baad5ad09a60ac1a87f987b656fc"),
    _esm2("15B", 48, 5120, 40, "5fbca39631164edc1d402a5aa369f982f72ee282"),
    CatalogueEntry("tiny", _DNABERT_TINY, "", "", "MIT"),
    CatalogueEntry("DNABERT-S", _DNABERT, "zhihan1996/DNABERT-S", _DNABERT_S_COMMIT, ""),
    CatalogueEntry("DNABERT-2", _DNABERT, "zhihan1996/DNABERT-2-117M", _DNABERT_2_COMMIT, "Apache-2.0"),
)
BUNDLED_TOKENIZER: Final = _BUNDLED / "dnabert_tiny" / "tokenizer.json"
BUNDLED_HEADS: Final = {"tiny": _BUNDLED / "heads" / "tiny.safetensors"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPurpose:
    """What a head was trained for, as its file states it; published heads state nothing.

    Attributes:
        chunk_length: in bp; None if it is not stated.
        calibrated: whether its scores are meant to be probabilities.
    """

    chunk_length: Annotated[int, Field(ge=1)] | None = None
    frames: FrameRule = "open"
    calibrated: bool = True


def find_entries(name: str, family: Family | None) -> list[CatalogueEntry]:
    """The entries called `name`, ignoring case; at most one per family. None searches all families."""
    return [entry for entry in CATALOGUE if family in (None, entry.spec.family) and entry.is_called(name)]


def known_names(family: Family | None) -> str:
    """Short names, for messages."""
    names = [entry.name for entry in CATALOGUE if family in (None, entry.spec.family)]
    return ", ".join(dict.fromkeys(names))


def split_family(model: str) -> tuple[Family | None, str]:
    """Family and name in `esm2:NAME|PATH` and `dnabert:NAME|PATH`; None and all of it without a prefix."""
    prefix, _, name = model.partition(":")
    return (_PREFIXES[prefix], name) if prefix in _PREFIXES and name else (None, model)


def require_known_model(name: str, family: Family | None) -> None:
    """Raises CheckpointError for what is neither a catalogue name, a path nor `owner/name`; fetches and reads nothing."""
    # os.path answers even for names that no file can have.
    is_path = os.path.exists(os.path.expanduser(name))
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII)
    if not (find_entries(name.removeprefix(RANDOM), family) or is_path or is_hub_name):
        raise CheckpointError(
            f"unknown model {name}: not a file or folder, not OWNER/NAME on the model hub, "
            f"and not one of {known_names(family)}."
        )


def head_of(config: RunConfig) -> str:
    """The head of a run that makes calls: name of a bundled one or path of another, which may not exist.

    Raises:
        UsageError: a model is missing, or no head is given and none is bundled for these models.
    """
    if config.esm_model is None or config.dnabert_model is None:
        raise UsageError("viral calls need both an ESM-2 and a DNABERT-S model: name both.")
    if config.head is not None:
        return config.head
    names = (config.dnabert_model, config.esm_model)
    if any(name.casefold() != "tiny" for name in names):
        listed = " and ".join(Path(name).name for name in names)
        raise UsageError(
            f"no classifier head is bundled for {listed}: give --head, such as VirNucPro's 500_model.pth for DNABERT-S "
            "and 3B, or use both tiny models."
        )
    return "tiny"


def chunks_of(config: RunConfig) -> tuple[ChunkRule | None, FrameRule]:
    """How a run cuts records, None for whole sequences, and what it embeds of the chunks.

    The head of a run that makes calls resolves "auto": to the length that it states, else to that of its frames.

    Raises:
        CheckpointError: there is no such head.
        MismatchError: it was trained for chunks of another length.
        UsageError: none is given, and none is bundled for these models; or its scores are not calibrated, which `--fdr` and `--prior` need.
    """
    chunk_length = config.chunk_length
    if config.frames is not None and chunk_length != "auto":
        return chunk_length, config.frames
    head = head_of(config)
    purpose = read_purpose(resolve_head(head, None if chunk_length == "auto" else chunk_length))
    frames = config.frames or purpose.frames
    needs_calibration = config.fdr is not None or config.prior is not None
    if needs_calibration and not (FRAME_KINDS[frames].is_calibrated and purpose.calibrated):
        raise UsageError(
            f"--fdr and --prior need a calibrated head that scores contigs, and {Path(head).name} is not one (see "
            "`virnuc inspect`). Omit them, or use a calibrated head of `virnuc train --frames longest`."
        )
    if chunk_length == "auto":
        return purpose.chunk_length or FRAME_KINDS[frames].chunk_rule, frames
    return chunk_length, frames


def resolve_head(
    name_or_path: str, chunk_length: ChunkRule | None = None, frames: FrameRule | None = None
) -> Path:
    """The file of a head: a name in `BUNDLED_HEADS`, or a path.

    Raises:
        CheckpointError: there is no such head.
        MismatchError: it was not trained for chunks of this length or for these frames of them; None skips the check.
    """
    path = BUNDLED_HEADS.get(name_or_path, Path(os.path.expanduser(name_or_path))).absolute()
    if not os.path.isfile(path):
        raise CheckpointError(
            f"unknown classifier head {name_or_path}: not a file, and not one of {', '.join(BUNDLED_HEADS)}."
        )
    purpose = read_purpose(path)
    if chunk_length is not None and purpose.chunk_length not in (None, chunk_length):
        raise MismatchError(
            f"head {name_or_path} was trained on chunks of {purpose.chunk_length} bp, but these have "
            f"{chunks_in_words(chunk_length)}. Use --chunk-length {purpose.chunk_length}, or a head trained on "
            f"{chunks_in_words(chunk_length)}."
        )
    if frames not in (None, purpose.frames):
        raise MismatchError(
            f"head {name_or_path} was trained on the {FRAMES_IN_WORDS[purpose.frames]} of chunks, but these embeddings are of "
            f"their {FRAMES_IN_WORDS[frames]}. Use a head for those (`virnuc train --frames {frames}`), or start a new run "
            "with this head (`virnuc predict`)."
        )
    return path


def is_own_head(path: Path) -> bool:
    """Whether a file is a head that virnuc wrote."""
    return bool(_stated_by(path))


def _stated_by(path: Path) -> str:
    """JSON that virnuc wrote in a head; "" in other files and damaged ones, which loading their tensors reports better."""
    try:
        with safe_open(path, framework="np") as file:
            return str((file.metadata() or {}).get(HEAD_METADATA, ""))
    except (SafetensorError, OSError):
        return ""


def read_facts(path: Path) -> dict[str, Any]:
    """What virnuc stated in a head; raises ValueError if that is not a JSON object."""
    return parse_object(_stated_by(path) or "{}")


def read_purpose(path: Path) -> HeadPurpose:
    """What a head was trained for, read without torch; raises CheckpointError if its file does not state it properly."""
    try:
        facts = read_facts(path).items()
        return from_json(HeadPurpose, {name: value for name, value in facts if name in HeadPurpose.__slots__})
    except ValueError as error:
        raise CheckpointError(
            f"{path} has invalid training metadata: {error}. Retrain it with virnuc train."
        ) from error
