"""Every reader of virnuc: its valid files, how they are edited, what reads them, and invariants of what is accepted."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from prefect import Flow
from prefect.exceptions import ParameterTypeError

from benchmarks.reliability import edits, hostile
from benchmarks.reliability.harness import is_harmless
from benchmarks.reliability.hostile import HOSTILE_VALUES, hostile_json
from benchmarks.reliability.malicious_pickles import malicious_files
from benchmarks.reliability.samples import CHUNK_LENGTH, sequence_files
from benchmarks.reliability.small_run import CONTIGS, make_inputs, run
from flows.embed import embed
from flows.nightly import nightly
from flows.predict import predict
from virnuc_cli.main import main
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.inference.events import GpuSample, LaneFailed, LaneStarted
from virnuc_core.inference.lane_journal import JournalTail, LaneJournal, error_of, lane_report
from virnuc_core.inference.plan import read_plan, require_same_plan
from virnuc_core.inference.shard import pending_shards, read_identity
from virnuc_core.models.catalogue import head_of, require_known_model, resolve_head
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.inspect import inspect_path
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore, write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import (
    EmbedSettings,
    FramesSettings,
    LaneSettings,
    PredictSettings,
    Settings,
    predict_config,
    read_settings,
)
from virnuc_core.specs import Alphabet

_DNA: Final = ("ACGT" * 40, "ACGTNNNNACGT", "", "acgtRYKM", "A" * 300)
_ROWS: Final = 4096


def make_samples(folder: Path) -> None:
    """All valid files, and a finished run."""
    make_inputs(folder, 0)
    for name, content in sequence_files().items():
        (folder / name).write_bytes(content)
    (folder / CONTIGS).write_bytes(sequence_files()["in.fa"])
    (folder / "parameters.json").write_text("{}")
    run(folder / "run", folder)
    with LaneJournal(RunFolder(folder / "run").lane_journal("lane-0000")) as journal:
        journal.write(GpuSample(lane=0, utilization=0.5, memory_bytes=1 << 30))
        journal.write(LaneFailed(lane=0, error="DeviceError", message="gone", retryable=False))


def _require(condition: bool, otherwise: str) -> None:
    """Raises if virnuc accepted an input wrongly."""
    if not condition:
        raise AssertionError(otherwise)


def _inspect(path: Path) -> bool:
    """`virnuc inspect`; whether the file is intact."""
    inspected = inspect_path(path)
    _require(is_harmless(inspected.summary), "the summary can do harm")
    return inspected.is_intact


def _read_sequences(path: Path, alphabet: Alphabet) -> None:
    """Builds a store, and checks the rows and cells of its tables."""
    is_dna = alphabet == "dna"
    rejected, table = path.with_name("rejected.tsv"), path.with_name("frames.tsv")
    length = CHUNK_LENGTH if is_dna else None
    store = build_frame_store([path], path.with_name("store"), length, alphabet, rejected_copy=rejected)
    lines = rejected.read_text(encoding="utf-8").splitlines()
    _require(len(lines) == store.meta.num_rejected + 1, "rejected.tsv has other rows than records rejected")
    _require(all(line.count("\t") == 4 for line in lines), "rejected.tsv has torn rows")
    for name in store.record_names(0, store.num_records):
        _require(is_harmless(name) and name[0] not in "=+-@\"'", f"the name {name!r} can do harm")
        _require(len(name.encode()) <= 1100, f"the name {name[:20]!r}... is too long")
    if is_dna:
        write_frames_tsv(store, table)
        rows = table.read_text(encoding="utf-8").splitlines()
        _require(len(rows) == store.num_frames + 1, "the table of frames has other rows than frames")


def _read_tokenizer(path: Path) -> None:
    """Applied to some DNA."""
    tokenizer = DnabertTokenizer(path)
    ids = tokenizer.encode(ByteColumn.from_strings(_DNA)).input_ids
    _require(bool((ids >= 0).all() and (ids < tokenizer.vocab_size).all()), "ids outside of the vocabulary")


def _read_model(path: Path) -> None:
    """A checkpoint by its file, or by its folder if it has configuration files."""
    location = path.parent if (path.parent / "config.json").exists() else path
    _inspect(location)
    state = open_checkpoint(str(location), None).state_dict()
    _require(all(tensor.is_floating_point() for tensor in state.values()), "weights that are no real numbers")


def _read_head(path: Path) -> None:
    _inspect(path)
    load_classifier(path)


def _read_shard(path: Path) -> None:
    """As `virnuc inspect`, a resumed run and the aggregation read it."""
    folder = RunFolder(path.parents[1])
    inspect_path(path)
    plan = read_plan(folder.plan)
    if not pending_shards(folder, plan):
        aggregate(folder, plan, FrameStore.open(folder.frames), folder.root / "again.h5")
    for aside in folder.shards.glob("*.damaged-*"):
        aside.unlink()
    if path.exists():
        read_identity(path)


def _read_embeddings(path: Path) -> None:
    """As `virnuc inspect` and `virnuc score` read it."""
    _inspect(path)
    scores = path.with_name("scores.tsv")
    rows = score_embeddings(path, str(path.parents[1] / "head.safetensors"), scores)
    lines = scores.read_text(encoding="utf-8").splitlines()
    _require(len(lines) == rows + 1, "the table has other rows than the file")


def _read_run(path: Path) -> None:
    """A run's folder, as `virnuc inspect` and a resumed run read it."""
    folder = RunFolder(path.parent)
    _inspect(folder.root)
    plan = read_plan(folder.plan)
    require_same_plan(plan, plan, folder)
    pending_shards(folder, plan)


def _read_store(path: Path) -> None:
    """A frame store, with its ids if its checksum is valid."""
    is_intact = inspect_path(path.parent).is_intact
    store = FrameStore.open(path.parent)
    if is_intact:
        for begin in range(0, store.num_frames, _ROWS):
            store.frame_ids(begin, min(begin + _ROWS, store.num_frames))


def _read_journal(path: Path) -> None:
    """As the lane's run reads it."""
    entries = JournalTail(path).read_new()
    if any(isinstance(entry.event, LaneStarted) for entry in entries):
        json.dumps(lane_report(entries).seconds)
    for entry in entries:
        if isinstance(entry.event, LaneFailed):
            error_of(entry.event)


# Hostile parameters: which entry point is called, and with what.

_RUN: Final = ("mode", "lane_minutes", "settings", "out")
_PARAMETERS: Final = {
    "settings predict": tuple(PredictSettings.model_fields),
    "settings embed": tuple(EmbedSettings.model_fields),
    "settings lanes": tuple(LaneSettings.model_fields),
    "settings frames": tuple(FramesSettings.model_fields),
    "flow predict": ("inputs", "force", *_RUN),
    "flow embed": ("inputs", "model", "force", *_RUN),
    "flow nightly": ("inbox", "settle_seconds", *_RUN),
    "cli inspect": ("path",),
    "cli frames": ("inputs", "chunk_length", "out"),
    "cli score": ("inputs", "head", "out"),
    "folder": ("out", "inputs"),
}
_TEXTS: Final = (
    *[value for value in HOSTILE_VALUES if isinstance(value, str)],
    *(
        "a" * 300,
        "b/" * 3000,
        "\udcff.fa",
        "-",
        "--",
        "/dev/null",
        "/dev/zero",
        "in.fa\n",
        "~nobody/x",
        "%s%n",
    ),
    *("esm2:", "random:", "random:8M", "dnabert:\0", "a/b", "../..", "tiny", "\U0001f9ec"),
    *("in.fa", "run", "head.safetensors"),
)
_NUMBERS: Final = (
    *(
        "0",
        "-1",
        "3",
        "60",
        "1e9",
        "nan",
        "inf",
        "99999999999999999999",
        "10000001",
        "0x10",
        "",
        "\0",
        "\u0663",
    ),
)


def _draw_call(draw: DrawFn, _: bytes) -> bytes:
    """A call with hostile values, as JSON."""
    door = draw(st.sampled_from(sorted(_PARAMETERS)))
    is_command = door.startswith("cli")
    values: dict[str, Any] = {}
    for name in _PARAMETERS[door]:
        if is_command or draw(st.booleans()):
            choices = _NUMBERS if name == "chunk_length" else _TEXTS
            values[name] = draw(st.sampled_from(choices if is_command else (*choices, *HOSTILE_VALUES)))
    return json.dumps({"door": door, "values": values}).encode()


def _read_call(path: Path) -> None:
    """Makes the call that the file describes."""
    call = json.loads(path.read_bytes())
    kind, _, name = call["door"].partition(" ")
    calls = {"settings": _read_settings, "flow": _call_flow, "folder": _open_folder, "cli": _call_command}
    calls[kind](name, call["values"])


def _read_settings(name: str, values: Mapping[str, Any]) -> None:
    kinds: dict[str, type[Settings]] = {
        "embed": EmbedSettings,
        "lanes": LaneSettings,
        "frames": FramesSettings,
    }
    if name in kinds:
        read_settings(kinds[name], values)
        return
    config = predict_config(read_settings(PredictSettings, values))
    require_known_model(str(config.esm_model), "esm2")
    require_known_model(str(config.dnabert_model), "dnabert_s")
    resolve_head(head_of(config))


def _call_flow(name: str, values: Mapping[str, Any]) -> None:
    flows: dict[str, tuple[Flow[Any, Any], dict[str, Any]]] = {
        "predict": (predict, {"inputs": ["in.fa"]}),
        "embed": (embed, {"inputs": ["in.fa"], "model": "tiny"}),
        "nightly": (nightly, {"inbox": "in"}),
    }
    flow, needed = flows[name]
    with contextlib.suppress(ParameterTypeError):
        flow.validate_parameters({"out": "out", **needed, **values})


def _open_folder(_: str, values: Mapping[str, Any]) -> None:
    """What a flow does with its paths after their type check."""
    out = Path("out") / str(values.get("out", "x")).replace("..", "").lstrip("/")
    with open_run_folder(out, force=False) as folder:
        build_frame_store([str(values.get("inputs", "in.fa"))], folder.frames, 60)


def _call_command(name: str, values: Mapping[str, Any]) -> None:
    arguments = [name, values.get("path", values.get("inputs"))]
    for option in ("chunk_length", "head"):
        if option in values:
            arguments += [f"--{option.replace('_', '-')}", values[option]]
    if "out" in values:
        arguments += ["--out", f"out/{values['out'].replace('..', '')}"]
    printed = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)
        for errors in ("strict", "backslashreplace")
    ]
    with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]):
        code = main(arguments)
    for stream in printed:
        stream.flush()
        text = stream.buffer.getvalue().decode()
        _require("unexpected" not in text and code in range(7), f"exit code {code}: {text[-300:]!r}")
        _require(is_harmless(text), f"what is printed can do harm: {text[:300]!r}")


Crafted = Mapping[str, bytes] | Iterator[tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One kind of input.

    Attributes:
        targets: patterns of the samples to edit, one at a time.
        read: reads the edited file, or its folder; may raise only VirnucError.
        crafted: further inputs by name, each replacing the first target; the argument is the marker of malicious pickles.
        runs_code: whether the input could carry code, so that the process is watched.
    """

    targets: tuple[str, ...]
    read: Callable[[Path], None]
    edit: edits.Edit = edits.edit_bytes
    crafted: Callable[[Path], Crafted] = lambda _: {}
    runs_code: bool = False


def _dna(*targets: str, edit: edits.Edit = edits.edit_bytes, crafted: Callable[[Path], Crafted]) -> Reader:
    return Reader(targets=targets, read=lambda path: _read_sequences(path, "dna"), edit=edit, crafted=crafted)


def _json(*targets: str, read: Callable[[Path], None], key: str) -> Reader:
    return Reader(
        targets=targets, read=read, edit=edits.edit_json_or_bytes, crafted=lambda _: hostile_json(key)
    )


def _safetensors(*targets: str, read: Callable[[Path], None]) -> Reader:
    return Reader(
        targets=targets,
        read=read,
        edit=edits.edit_safetensors,
        crafted=lambda _: hostile.safetensors_headers(),
    )


def _hdf5(*targets: str, read: Callable[[Path], None], first: str) -> Reader:
    return Reader(
        targets=targets,
        read=read,
        edit=edits.edit_hdf5,
        crafted=lambda _: hostile.hdf5_files(Path(first).read_bytes()),
    )


def _pickled_models(marker: Path) -> Iterator[tuple[str, bytes]]:
    yield from malicious_files(marker).items()
    names = [f"encoder.layer.0.attention.self.{part}.weight" for part in ("query", "key", "value")]
    yield from hostile.torch_files(names).items()


def _pickled_heads(marker: Path) -> Iterator[tuple[str, bytes]]:
    yield from malicious_files(marker).items()
    yield from hostile.torch_files(["hidden_layer.weight", "output_layer.weight", "bn1.weight"]).items()
    yield "2^40 modules", hostile.module_of_modules()
    yield "1 GB of strings in 1 MB", hostile.compressed_archive()


READERS: Final[dict[str, Reader]] = {
    "FASTA": _dna(
        "in.fa", crafted=lambda _: hostile.odd_names(b">", b" x\nACGTACGTACGT\n") | hostile.fasta_layouts()
    ),
    "FASTQ": _dna("in.fq", crafted=lambda _: hostile.odd_names(b"@", b"\nACGTA\n+\nIIIII\n")),
    "compressed streams": _dna(
        "*.fa.*", "*.fq.*", edit=edits.edit_compressed, crafted=lambda _: hostile.bombs()
    ),
    "protein FASTA": Reader(
        targets=("proteins.fa",),
        read=lambda path: _read_sequences(path, "protein"),
        crafted=lambda _: hostile.odd_names(b">", b"\nMKV\n") | hostile.fasta_layouts(),
    ),
    "tokenizer.json": Reader(
        targets=("dnabert/tokenizer.json",),
        read=_read_tokenizer,
        edit=edits.edit_json_or_bytes,
        crafted=lambda _: hostile_json("model") | hostile.hostile_tokenizers(),
    ),
    "config.json": _json(
        "esm2/config.json", "dnabert/config.json", read=_read_model, key="num_hidden_layers"
    ),
    "weight index": _json("sharded/model.safetensors.index.json", read=_read_model, key="weight_map"),
    "safetensors": _safetensors("dnabert/model.safetensors", "sharded/*.safetensors", read=_read_model),
    ".pt and .bin weights": Reader(
        targets=("esm2/pytorch_model.bin", "esm2_fair.pt"),
        read=_read_model,
        edit=edits.edit_archive,
        crafted=_pickled_models,
        runs_code=True,
    ),
    ".pth heads": Reader(
        targets=("head_module.pth", "head_state.pth"),
        read=_read_head,
        edit=edits.edit_archive,
        crafted=_pickled_heads,
        runs_code=True,
    ),
    "legacy .pth heads": Reader(targets=("head_legacy.pth",), read=_read_head, runs_code=True),
    "safetensors heads": _safetensors("head.safetensors", read=_read_head),
    "HDF5 shards": _hdf5("run/shards/*.h5", read=_read_shard, first="run/shards/shard_00000.h5"),
    "embeddings.h5": _hdf5("run/embeddings.h5", read=_read_embeddings, first="run/embeddings.h5"),
    "plan.json": _json("run/plan.json", read=_read_run, key="shards"),
    "run.json": _json("run/run.json", read=_read_run, key="counts"),
    "frame store": _json("run/frames/*", read=_read_store, key="inputs"),
    "lane journals": Reader(
        targets=("run/lanes/*.jsonl",),
        read=_read_journal,
        edit=edits.edit_lines,
        crafted=lambda _: hostile_json("time"),
    ),
    "parameters": Reader(targets=("parameters.json",), read=_read_call, edit=_draw_call),
}
