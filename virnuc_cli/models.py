"""`virnuc models`: lists and manages models."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, CommandGroup, command
from virnuc_core.errors import DamagedFileError

if TYPE_CHECKING:
    from virnuc_cli.terminal import OutputMode
    from virnuc_core.inference.model_facts import HeadFacts, ModelFacts
    from virnuc_core.models.hub import Pulled

_LETTERS = {"esm2": "aa", "dnabert_s": "bp"}
_FLAGS = {"esm2": "--esm-model", "dnabert_s": "--dnabert-model"}
_NAMES = click.Argument(["names"], nargs=-1, required=True, metavar="NAME...")


@cli.group(name="models", cls=CommandGroup)
def models_group() -> None:
    """Lists, downloads, verifies and converts models."""


@command(models_group, name="list")
def list_models() -> Answer:
    """The catalogue: size, memory, speed, source, licence, and what is on this machine."""
    from virnuc_core.inference.model_facts import head_facts, model_facts  # imports torch

    models, heads = model_facts(), head_facts()
    document = {
        "models": [facts.document for facts in models],
        "heads": [asdict(facts) | {"location": str(facts.location)} for facts in heads],
    }
    return Answer(document, _catalogue_text(models, heads))


@command(
    models_group,
    _NAMES,
    click.Option(
        ["--to"], metavar="DIR", help="Also copy each to a folder of its own in DIR, to be carried elsewhere."
    ),
)
def pull(names: tuple[str, ...], to: str | None, output: "OutputMode") -> Answer:
    """Downloads models ahead of time, at their pinned revisions, and checks their hashes."""
    from virnuc_core.models.hub import hide_progress
    from virnuc_core.models.hub import pull as pull_one  # imports torch

    if output != "human":
        hide_progress()
    done = [pull_one(name, Path(to).expanduser() if to else None) for name in names]
    document = {
        "pulled": [
            asdict(pulled)
            | {"location": str(pulled.location), "copy": str(pulled.copy) if pulled.copy else None}
            for pulled in done
        ]
    }
    return Answer(document, "\n".join(map(_pulled_text, done)))


@command(models_group, _NAMES)
def verify(names: tuple[str, ...]) -> Answer:
    """Reads all of models or heads, by name or path: hashes as far as known, structure, numbers."""
    from virnuc_core.models.hub import verify_all  # imports torch

    found = [each for name in names for each in verify_all(name)]
    exit_code = 0 if all(each.is_whole for each in found) else DamagedFileError.exit_code
    document = {"models": [each.document for each in found]}
    return Answer(document, "\n".join(each.summary for each in found), exit_code)


@command(
    models_group,
    click.Argument(["path"]),
    click.Option(
        ["--out"],
        required=True,
        metavar="DIR|FILE",
        help="New folder for a model, or .safetensors file for a head.",
    ),
)
def convert(path: str, out: str) -> Answer:
    """Writes the weights in PATH (fair-esm .pt, a model's folder, a pickled head) as safetensors.

    The vectors and scores stay bit-identical. No code in a pickle is run.
    """
    from virnuc_core.models.conversion import convert as write_safetensors  # imports torch

    done = write_safetensors(Path(path).expanduser(), Path(out).expanduser())
    document = {
        "kind": done.kind,
        "source": str(done.source),
        "out": str(done.out),
        "fingerprint": done.fingerprint,
    }
    return Answer(
        document,
        f"{done.kind} of {done.source} in {done.out}, the same weights\n  fingerprint {done.fingerprint}",
    )


def _catalogue_text(models: "list[ModelFacts]", heads: "list[HeadFacts]") -> str:
    from virnuc_cli.terminal import aligned  # imports rich

    costs: list[tuple[str, ...]] = [
        ("name", "for", "layers", "width", "parameters", "disk", "GPU fp32", "fp16", "fp8", "CPU", "speed")
    ]
    sources = [("name", "here", "licence", "from")]
    for facts in models:
        gpu = facts.gpu_bytes
        costs.append(
            (
                facts.entry.name,
                "protein" if facts.entry.family == "esm2" else "DNA",
                str(facts.spec.num_layers),
                str(facts.spec.embedding_dim),
                f"{facts.num_parameters / 1e6:,.1f} M",
                f"{'' if facts.location else '~'}{_gigabytes(facts.disk_bytes)}",
                *(_gigabytes(gpu[name]) for name in ("fp32", "fp16", "fp8")),
                _gigabytes(facts.cpu_bytes),
                _speed(facts),
            )
        )
        document = facts.document
        origin = (
            f"{document['repository']}@{document['revision']}" if document["repository"] else "this package"
        )
        sources.append((facts.entry.qualified_name, facts.here, facts.entry.licence or "NA", origin))
    sources += [(f"head {head.name}", "bundled", "MIT", "this package") for head in heads]
    notes = (
        "Memory in GB: weights, and one batch of the default number of tokens, which is made smaller where there is\n"
        "less room; bf16 as fp16; the CPU in fp32. Speed: fp16 on one NVIDIA H200, where it was measured; --json has\n"
        "all figures with their commands. ~: not here, the size of fp32 weights. Licence NA: see the model's page."
    )
    return "\n\n".join([aligned(costs, numbers=range(2, 11)), aligned(sources), notes])


def _speed(facts: "ModelFacts") -> str:
    for speed in facts.speeds:
        if speed.precision == "fp16" and speed.machine == "NVIDIA H200":
            return f"{speed.letters_per_second:,.0f} {_LETTERS[facts.entry.family]}/s"
    return "NA"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f}" if size < 1e8 else f"{size / 1e9:,.1f}"


def _pulled_text(pulled: "Pulled") -> str:
    known = f"hashes as in {pulled.hashes_from}" if pulled.hashes_from else "no hashes are known of its files"
    lines: list[Any] = [f"{pulled.name}: whole, {known}", f"  in {pulled.location}"]
    if pulled.copy is not None:
        lines.append(
            f"  copy in {pulled.copy}: carry that folder to the other machine, and give "
            f"{_FLAGS[pulled.family]} {pulled.copy} as it is called there"
        )
    elif pulled.revision is not None:
        lines.append("  for a machine without a network: the same command with --to DIR, and carry DIR there")
    return "\n".join(lines)
