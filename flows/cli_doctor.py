"""`virnuc doctor`: what is wrong with this machine or installation, and what to do."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from flows.cli_options import OUTPUT_OPTIONS, output_mode, with_options

if TYPE_CHECKING:
    from flows.terminal import OutputMode


@click.command()
@with_options(
    click.option("--quick", is_flag=True, help="Without the small run on each device."),
    click.option(
        "--compare",
        metavar="MODEL",
        help="Compare this model's vectors with those of the program it was published for, and nothing else.",
    ),
    *OUTPUT_OPTIONS,
)
@click.pass_context
def doctor(
    ctx: click.Context, /, quick: bool, compare: str | None, quiet: bool, as_json: bool, debug: bool
) -> int:
    """Looks at versions, GPUs, memory, disks, settings, Prefect, MLflow, caches, models, and makes a small run.

    Exit code 0 when nothing is a problem, 5 when something is with a GPU or what computes on it, else 2. With --compare
    0 when the vectors are the same within rounding, 5 when they are not.
    """
    if compare is not None:
        return _compare(compare, output_mode(quiet, as_json))
    from flows.commands import show
    from flows.doctor import all_findings
    from virnuc_core.errors import DeviceError, UsageError

    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    findings = []
    for finding in all_findings(root.command, root.params["config"], quick=quick):
        findings.append(finding)
        if not as_json and (finding.state != "ok" or not quiet):
            click.echo(finding.summary)
    problems = [finding for finding in findings if finding.state == "problem"]
    warnings = sum(finding.state == "warning" for finding in findings)
    counts = {"problems": len(problems), "warnings": warnings}
    document = {"findings": [asdict(finding) for finding in findings], **counts}
    show(
        output_mode(quiet, as_json),
        document,
        f"{len(findings)} checks: {len(problems)} problems, {warnings} warnings",
    )
    if not problems:
        return 0
    return DeviceError.exit_code if any(finding.is_device for finding in problems) else UsageError.exit_code


def _compare(model: str, output: "OutputMode") -> int:
    """`virnuc doctor --compare`; gives the exit code."""
    from flows.commands import show
    from flows.terminal import terminal
    from virnuc_core.doctor.comparison import compare_model  # imports torch
    from virnuc_core.errors import DeviceError

    with terminal(output):
        found = compare_model(model)
    show(output, found.document, found.summary)
    return 0 if found.is_same else DeviceError.exit_code
