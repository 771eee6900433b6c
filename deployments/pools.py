"""Base job templates of the work pools: how a worker starts a run, as a process of its own or as a Kubernetes Job."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml
from prefect.workers.process import ProcessWorker

from deployments.server import POOLS
from virnuc_core.errors import UsageError

PoolType = Literal["process", "kubernetes"]
POOL_TYPES: Final = get_args(PoolType)
KUBERNETES_FILE: Final = Path(__file__).with_name("kubernetes.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolChoice:
    """Requested changes to the work pools.

    Attributes:
        type: of all pools; None keeps the current one, at first "process".
        job_variables: defaults, each "NAME=VALUE" for all pools or "POOL.NAME=VALUE" for one; values are JSON or text.
    """

    type: PoolType | None = None
    job_variables: tuple[str, ...] = ()

    def template(self, pool: str, current: Mapping[str, Any] | None) -> dict[str, Any]:
        """The base job template of a pool: the current or a new one, with the requested defaults.

        Raises:
            UsageError: a variable is not of this pool's template, or not of the form above.
        """
        template = _new_template(self.type or "process", pool) if current is None else deepcopy(dict(current))
        variables = template["variables"]["properties"]
        for name, value in self._variables(pool).items():
            if name not in variables:
                raise UsageError(
                    f"--job-variable {name}: the work pool {pool} has no such variable; it has {', '.join(variables)}."
                )
            is_text = variables[name].get("type") == "string"
            variables[name]["default"] = value if is_text else _parsed(value)
        return template

    def _variables(self, pool: str) -> dict[str, str]:
        found = {}
        for text in self.job_variables:
            target, equals, value = text.partition("=")
            named, dot, name = target.rpartition(".")
            if not equals or (dot and named not in POOLS):
                raise UsageError(
                    f"--job-variable {text} is not understood: give NAME=VALUE, or POOL.NAME=VALUE with one of "
                    f"{', '.join(POOLS)}."
                )
            if named in ("", pool):
                found[name] = value
        return found


def _new_template(kind: PoolType, pool: str) -> dict[str, Any]:
    if kind == "process":
        return deepcopy(ProcessWorker.get_default_base_job_template())
    document = yaml.safe_load(KUBERNETES_FILE.read_text())
    template: dict[str, Any] = document["base_job_template"]
    for name, value in document["pools"][pool].items():
        template["variables"]["properties"][name]["default"] = value
    return template


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
