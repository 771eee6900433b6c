"""Everything that virnuc uses of Prefect and MLflow beside their documented interfaces, and that it is still there.

What is not in this list must not be used; the bounds of both in pyproject.toml are as wide as it allows.
"""

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import mlflow
import pytest

ROOT = Path(__file__).parents[3]
MLFLOW = Path(mlflow.__file__).parent


def is_called(name: str) -> Callable[[str], bool]:
    """A constant of theirs with the text that virnuc writes."""
    return lambda text: bool(resolve_name(name) == text)


USES: dict[str, Callable[[str], Any]] = {
    # The applications of both servers, behind deployments/gate.py, and the variables of MLflow's command line for its own.
    "prefect.server.api.server:create_app": lambda name: inspect.signature(resolve_name(name)).parameters[
        "final"
    ],
    "mlflow.server.fastapi_app:app": resolve_name,
    "_MLFLOW_SERVER_FILE_STORE": is_called("mlflow.server:BACKEND_STORE_URI_ENV_VAR"),
    "_MLFLOW_SERVER_ARTIFACT_ROOT": is_called("mlflow.server:ARTIFACT_ROOT_ENV_VAR"),
    # Tags that MLflow's page shows in places of their own.
    "mlflow.note.content": is_called("mlflow.utils.mlflow_tags:MLFLOW_RUN_NOTE"),
    "mlflow.user": is_called("mlflow.utils.mlflow_tags:MLFLOW_USER"),
    "mlflow.source.name": is_called("mlflow.utils.mlflow_tags:MLFLOW_SOURCE_NAME"),
    "mlflow.source.type": is_called("mlflow.utils.mlflow_tags:MLFLOW_SOURCE_TYPE"),
    "mlflow.data.context": is_called("mlflow.utils.mlflow_tags:MLFLOW_DATASET_CONTEXT"),
    "mlflow.experimentKind": lambda _: any(
        "custom_model_development" in path.read_text()
        for path in MLFLOW.glob("server/js/build/static/js/main.*.js")
    ),
    # Whether a flow runs, without importing Prefect.
    "prefect.context": lambda name: resolve_name(f"{name}:FlowRunContext.get"),
    # One flow run in a process.
}
PRIVATE = re.compile(
    r"prefect\.(?:server|context|engine|_)[\w.:]*|_MLFLOW\w+|(?<=\")mlflow\.(?!db)[\w.:]+(?=\")"
)


@pytest.mark.parametrize("text", USES)
def test_what_is_used_is_there(text: str) -> None:
    with warnings.catch_warnings():  # of MLflow's own code
        warnings.simplefilter("ignore")
        assert USES[text](text)


def test_nothing_else_is_used() -> None:
    sources = [path for folder in ("flows", "tasks", "deployments") for path in (ROOT / folder).rglob("*.py")]
    found = {match for path in sources for match in PRIVATE.findall(path.read_text())}
    assert found == USES.keys()
