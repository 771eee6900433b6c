"""`virnuc export`: embeddings for NumPy and AnnData."""

from pathlib import Path
from typing import Final, Literal

import click

EXPORT_OPTIONS: Final = (
    click.argument("embeddings", metavar="EMBEDDINGS"),
    click.option(
        "--to", required=True, metavar="FILE", help="The new file; .npz, .npy or .h5ad says what it is."
    ),
    click.option(
        "--vectors",
        type=click.Choice(["all", "dna", "protein"]),
        default="all",
        help="Of a predict run, the vectors of one model [all: DNA and protein side by side].",
    ),
)


def run_export(embeddings: str, *, to: str, vectors: str, output: Literal["human", "quiet", "json"]) -> None:
    """`virnuc export`."""
    from flows.commands import show
    from flows.outputs import folder_of, require_no_input
    from flows.terminal import terminal
    from virnuc_core.prediction.export import export_embeddings

    require_no_input(Path(to), (embeddings,))
    folder_of(Path(to))
    with terminal(output):
        rows = export_embeddings(embeddings, to, vectors=None if vectors == "all" else vectors)
    show(output, {"out": to, "counts": {"rows": rows}}, f"{rows} rows in {to}")
