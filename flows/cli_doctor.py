"""`virnuc doctor`: what is wrong with this machine or installation, and what to do."""

from dataclasses import asdict

import click

from flows.cli_options import OUTPUT_OPTIONS, output_mode, with_options


@click.command()
@with_options(
    click.option("--quick", is_flag=True, help="Without the small run on each device."),
    *OUTPUT_OPTIONS,
)
@click.pass_context
def doctor(ctx: click.Context, /, quick: bool, quiet: bool, as_json: bool, debug: bool) -> int:
    """Looks at versions, GPUs, memory, disks, settings, Prefect, MLflow, caches, models, and makes a small run.

    Exit code 0 when nothing is a problem, 5 when something is with a GPU or what computes on it, else 2.
    """
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
