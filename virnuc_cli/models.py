"""`virnuc models`: lists and manages models."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, CommandGroup, command

if TYPE_CHECKING:
    from virnuc_cli.terminal import OutputMode
    from virnuc_core.models.catalogue import CatalogueEntry
    from virnuc_core.models.checkpoint import Checkpoint


@cli.group(name="models", cls=CommandGroup)
def models_group() -> None:
    """List and download models."""


@command(models_group, name="list")
def list_models() -> Answer:
    """List known models: size, memory, source, licence, and which are on this machine."""
    from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE

    models = [_facts(entry) for entry in CATALOGUE]
    heads = [
        {"name": name, "location": str(path), "disk_bytes": path.stat().st_size}
        for name, path in BUNDLED_HEADS.items()
    ]
    return Answer({"models": models, "heads": heads}, _catalogue_text(models, heads))


def _facts(entry: "CatalogueEntry") -> dict[str, Any]:
    """One model; `disk_bytes` is the size of its files, or of fp32 parameters where it is not on this machine."""
    from virnuc_core.inference.device import needed_bytes, saturating_token_budget  # imports torch
    from virnuc_core.models.checkpoint import parameter_shapes
    from virnuc_core.models.hub import find_cached
    from virnuc_core.specs import ResolvedPrecision

    spec = entry.spec
    location = entry.bundled or find_cached(entry.repo, entry.revision)
    parameters = sum(math.prod(shape) for shape in parameter_shapes(spec).values())
    gpu_budget, cpu_budget = (saturating_token_budget(spec, kind) for kind in ("cuda", "cpu"))
    if location is None:
        disk_bytes, here = 4 * parameters, "no"
    else:
        disk_bytes = sum(path.stat().st_size for path in location.iterdir() if path.is_file())
        here = "bundled" if entry.bundled else "hub cache"
    return {
        "name": entry.name,
        "qualified_name": entry.qualified_name,
        "family": spec.family,
        "layers": spec.num_layers,
        "width": spec.embedding_dim,
        "heads": spec.num_heads,
        "parameters": parameters,
        "disk_bytes": disk_bytes,
        "disk_bytes_are": "measured" if location else "estimated",
        "gpu_token_budget": gpu_budget,
        "gpu_bytes": {name: needed_bytes(spec, name, gpu_budget) for name in get_args(ResolvedPrecision)},
        "cpu_token_budget": cpu_budget,
        "cpu_fp32_bytes": needed_bytes(spec, "fp32", cpu_budget),
        "repository": entry.repo or None,
        "revision": entry.revision or None,
        "licence": entry.licence or None,
        "here": here,
        "location": location and str(location),
    }


@command(
    models_group,
    click.Argument(["names"], nargs=-1, required=True, metavar="NAME..."),
    click.Option(
        ["--to"], metavar="DIR", help="Also copy each model to a folder in DIR, for use on another machine."
    ),
)
def pull(names: tuple[str, ...], to: str | None, output: "OutputMode") -> Answer:
    """Download models at their pinned revisions and verify their hashes."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from virnuc_core.models.hub import pull as pull_one  # imports torch

    if output != "human":
        disable_progress_bars()
    done = [pull_one(name, Path(to).expanduser() if to else None) for name in names]
    document = {
        "pulled": [
            {
                "name": model.name,
                "family": model.family,
                "location": str(model.location),
                "revision": revision,
                "fingerprint": model.fingerprint,
                "copy": copy and str(copy),
            }
            for model, revision, copy in done
        ]
    }
    return Answer(document, "\n".join(_pulled_text(*each) for each in done))


def _catalogue_text(models: list[dict[str, Any]], heads: list[dict[str, Any]]) -> str:
    from virnuc_cli.terminal import aligned

    costs: list[tuple[str, ...]] = [
        ("name", "for", "layers", "width", "parameters", "disk", "GPU fp32", "fp16", "fp8", "CPU")
    ]
    sources = [("name", "here", "licence", "from")]
    for facts in models:
        costs.append(
            (
                facts["name"],
                "protein" if facts["family"] == "esm2" else "DNA",
                str(facts["layers"]),
                str(facts["width"]),
                f"{facts['parameters'] / 1e6:,.1f} M",
                f"{'' if facts['location'] else '~'}{_gigabytes(facts['disk_bytes'])}",
                *(_gigabytes(facts["gpu_bytes"][name]) for name in ("fp32", "fp16", "fp8")),
                _gigabytes(facts["cpu_fp32_bytes"]),
            )
        )
        origin = f"{facts['repository']}@{facts['revision']}" if facts["repository"] else "this package"
        sources.append((facts["qualified_name"], facts["here"], facts["licence"] or "NA", origin))
    sources += [(f"head {head['name']}", "bundled", "MIT", "this package") for head in heads]
    notes = (
        "Memory in GB: weights plus one batch of the default size, which shrinks when memory is short. bf16 takes as much\n"
        "as fp16; the CPU column is fp32. ~: not downloaded, size of fp32 weights. Licence NA: see the model's page."
    )
    return "\n\n".join([aligned(costs, numbers=range(2, 10)), aligned(sources), notes])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f}" if size < 1e8 else f"{size / 1e9:,.1f}"


def _pulled_text(model: "Checkpoint", revision: str | None, copy: Path | None) -> str:
    lines = [f"{model.name}: fingerprint {model.fingerprint}", f"  in {model.location}"]
    if copy is not None:
        flag = "--esm-model" if model.family == "esm2" else "--dnabert-model"
        lines.append(
            f"  copied to {copy}: move this folder to the other machine and give its path there as {flag}"
        )
    elif revision is not None:
        lines.append("  for a machine without network access: repeat with --to DIR and move DIR there")
    return "\n".join(lines)
