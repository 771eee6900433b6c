"""Hostile parameters for the command line, the settings and the flows."""

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from prefect import Flow
from prefect.exceptions import ParameterTypeError

from benchmarks.reliability.mutations import HOSTILE_VALUES
from flows.embed import embed
from flows.nightly import nightly
from flows.predict import predict
from virnuc_cli.main import main
from virnuc_core.models.catalogue import head_of, require_known_model, resolve_head
from virnuc_core.results.run_opening import open_run_folder
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
        "esm2:",
    ),
    *(
        "random:",
        "random:8M",
        "dnabert:\0",
        "a/b",
        "../..",
        "tiny",
        "\U0001f9ec",
        "in.fa",
        "run",
        "head.safetensors",
    ),
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


def mutate_parameters(data: bytes, rng: Random) -> bytes:
    """A call with hostile values, as JSON; `data` lists the entry points and their parameters."""
    door, names = rng.choice(sorted(json.loads(data).items()))
    values: dict[str, Any] = {}
    for name in names:
        if rng.random() < 0.5 or door.startswith("cli"):
            choices: tuple[Any, ...] = _NUMBERS if name in ("chunk_length",) else _TEXTS
            values[name] = rng.choice((*choices, *HOSTILE_VALUES) if not door.startswith("cli") else choices)
    return json.dumps({"door": door, "values": values}).encode()


def all_parameters() -> bytes:
    """The entry points and their parameters."""
    settings = sorted(PredictSettings.model_fields)
    doors = {
        "settings predict": settings,
        "settings embed": sorted(EmbedSettings.model_fields),
        "settings lanes": sorted(LaneSettings.model_fields),
        "settings frames": sorted(FramesSettings.model_fields),
        "flow predict": ["inputs", "out", "settings", "force", "mode", "lane_minutes"],
        "flow embed": ["inputs", "out", "model", "settings", "force", "mode", "lane_minutes"],
        "flow nightly": ["inbox", "out", "settings", "mode", "lane_minutes", "settle_seconds"],
        "cli inspect": ["path"],
        "cli frames": ["inputs", "chunk_length", "out"],
        "cli score": ["inputs", "head", "out"],
        "folder": ["out", "inputs"],
    }
    return json.dumps(doors).encode()


def read_parameters(path: Path) -> None:
    """Makes the call that the file describes."""
    call = json.loads(path.read_bytes())
    if "door" not in call:  # the unmutated list
        return
    kind, _, name = call["door"].partition(" ")
    _DOORS[kind](name, call["values"])


def _settings(name: str, values: Mapping[str, Any]) -> None:
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


def _flow(name: str, values: Mapping[str, Any]) -> None:
    flows: dict[str, Flow[Any, Any]] = {"predict": predict, "embed": embed, "nightly": nightly}
    needed: dict[str, dict[str, Any]] = {
        "predict": {"inputs": ["in.fa"]},
        "embed": {"inputs": ["in.fa"], "model": "tiny"},
        "nightly": {"inbox": "in"},
    }
    with contextlib.suppress(ParameterTypeError):
        flows[name].validate_parameters({"out": "out"} | needed[name] | dict(values))


def _folder(_: str, values: Mapping[str, Any]) -> None:
    """What a flow does with its paths after their type check."""
    out = Path("out") / str(values.get("out", "x")).replace("..", "").lstrip("/")
    with open_run_folder(out, force=False) as folder:
        build_frame_store([str(values.get("inputs", "in.fa"))], folder.frames, 60)


def _cli(name: str, values: Mapping[str, Any]) -> None:
    first = values.get("path", values.get("inputs"))
    arguments = [name, first]
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
        if "unexpected" in text or code not in range(7):
            raise AssertionError(f"exit code {code}: {text[-300:]!r}")
        if not text.replace("\n", "").isprintable():
            raise AssertionError(f"what is printed can do harm: {text[:300]!r}")


_DOORS: Final[dict[str, Callable[[str, Mapping[str, Any]], None]]] = {
    "settings": _settings,
    "flow": _flow,
    "folder": _folder,
    "cli": _cli,
}
