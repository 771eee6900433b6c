"""Snakemake wrapper of `virnuc predict`."""

__author__ = "virnuc contributors"
__copyright__ = "Copyright 2026, virnuc contributors"
__license__ = "MIT"

from pathlib import Path

from snakemake.shell import shell

folders = {Path(file).parent for file in snakemake.output}
if len(folders) != 1:
    raise ValueError(f"the outputs of one rule must be in one folder, but are in {sorted(map(str, folders))}")
run = folders.pop()
devices = "auto" if snakemake.resources.get("gpu") else "cpu"
extra = snakemake.params.get("extra", "")
log = snakemake.log_fmt_shell(stdout=True, stderr=True)

shell(
    "VIRNUC_THREADS={snakemake.threads}"
    " virnuc predict {snakemake.input:q} --out {run:q} --devices {devices} {extra} {log}"
)
