"""A run's folder, or one file, checked byte by byte: what is whole, what is not, and what to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.shard import read_identity
from virnuc_core.plain_text import visible
from virnuc_core.results.embeddings_file import EmbeddingsFile
from virnuc_core.results.inspection import InspectedKind, inspect_path
from virnuc_core.results.run_check import Finding, check_run, check_shard
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.run_plan import RunPlan, read_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was found of everything at a path.

    Attributes:
        path: which.
        kind: what it is.
        findings: one or more for each file.
    """

    path: Path
    kind: InspectedKind
    findings: tuple[Finding, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged, missing or of another run."""
        return not any(found.is_bad for found in self.findings)

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "whole": self.is_whole,
            "findings": [
                {"path": str(found.path), "state": found.state, "message": found.message}
                for found in self.findings
            ],
        }

    @property
    def summary(self) -> str:
        """The same in lines for a person; what is whole is only counted."""
        num_whole = sum(found.state == "whole" for found in self.findings)
        lines = [f"{self.path}: {self.kind}, {'whole' if self.is_whole else 'not whole'}"]
        lines.append(
            f"  whole: {num_whole} of {len({found.path for found in self.findings})} files and folders"
        )
        lines += [f"  {found.state}: {found.message}" for found in self.findings if found.state != "whole"]
        return visible("\n".join(lines))


def check_path(path: Path) -> Check:
    """Reads all of a run's folder or of a file, and compares each part with what it must be.

    A shard and an embeddings file that lie where their run has them are compared with its plan, too.

    Raises:
        InputError: there is nothing at `path`.
    """
    folder = RunFolder(path)
    if folder.plan.is_file() or folder.incoming.previous is not None:
        return Check(path=path, kind="run folder", findings=tuple(check_run(folder, thorough=True)))
    found = inspect_path(path)
    findings = [Finding(path=path, state="damaged", message=problem) for problem in found.problems]
    if found.is_whole:
        findings = [_against_plan(path, found.kind)]
    return Check(path=path, kind=found.kind, findings=tuple(findings))


def _against_plan(path: Path, kind: InspectedKind) -> Finding:
    """Compares what is whole in itself with the plan of the run that it lies in, if it does."""
    try:
        if kind == "shard":
            plan = _plan_in(path.parents[1])
            index = read_identity(path)["index"]
            is_its_place = path == RunFolder(path.parents[1]).shard(index)
            if plan is not None and is_its_place and index < len(plan.shards):
                return check_shard(path, plan, plan.shards[index])
        elif kind == "embeddings file":
            beside = path.with_name(path.name + EMBED_SUFFIX)
            plan = _plan_in(beside if beside.is_dir() else path.parent)
            if plan is not None:
                with EmbeddingsFile(path) as file:
                    file.require_plan(plan)
    except DamagedFileError as error:
        return Finding(path=path, state="damaged", message=str(error))
    except MismatchError as error:
        return Finding(path=path, state="foreign", message=str(error))
    return Finding(path=path, state="whole")


def _plan_in(root: Path) -> RunPlan | None:
    plan = RunFolder(root).plan
    return read_plan(plan) if plan.is_file() else None
