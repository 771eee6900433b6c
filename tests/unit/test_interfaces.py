"""The command line, the parameters of the deployments and what users read change only on purpose.

After an intended change, `python -m tests.unit.test_interfaces` rewrites the files.
"""

import json
from pathlib import Path
from typing import Any

import click
import yaml

from scripts.sentences import texts
from virnuc_cli.main import cli
from virnuc_cli.options import RareOption, iter_commands

COMMAND_LINE = Path(__file__).with_name("interfaces") / "command_line.txt"
FLOW_PARAMETERS = Path(__file__).with_name("interfaces") / "flow_parameters.json"
TEXTS = Path(__file__).with_name("interfaces") / "texts.txt"
PREFECT_FILE = Path(__file__).parents[2] / "deployments" / "prefect.yaml"


def in_words(param: click.Parameter) -> str:
    is_option = isinstance(param, click.Option)
    words = [
        ", ".join([*param.opts, *param.secondary_opts]) if is_option else (param.name or "").upper(),
        ""
        if is_option and param.is_flag
        else param.metavar or "|".join(map(str, getattr(param.type, "choices", ()))),
        "required" if param.required else "",
        "multiple" if param.nargs == -1 or (is_option and param.multiple) else "",
        "only by --help-all" if isinstance(param, RareOption) else "",
    ]
    return "  ".join(filter(None, words))


def command_line() -> str:
    """Every command with its arguments and options, sorted."""
    commands = sorted(iter_commands(cli))
    blocks = [
        "\n  ".join([f"virnuc {name}", *sorted(map(in_words, found.params))]) for name, found in commands
    ]
    return "\n\n".join(blocks) + "\n"


def without_prose(schema: Any) -> Any:
    """A schema without titles and descriptions."""
    if isinstance(schema, dict):
        texts = {name for name in ("description", "title") if isinstance(schema.get(name), str)}
        return {name: without_prose(inner) for name, inner in schema.items() if name not in texts}
    return [without_prose(inner) for inner in schema] if isinstance(schema, list) else schema


def flow_parameters() -> dict[str, Any]:
    """Parameter schema of every deployment."""
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    items = yaml.safe_load(PREFECT_FILE.read_text())["deployments"]
    flows = {item["entrypoint"]: load_flow_from_entrypoint(item["entrypoint"]) for item in items}
    schemas = {name: parameter_schema(flow).model_dump(exclude_unset=True) for name, flow in flows.items()}
    return without_prose(json.loads(json.dumps(schemas)))


def test_the_command_line_is_frozen() -> None:
    assert command_line().splitlines() == COMMAND_LINE.read_text().splitlines()


def test_the_flags_of_predict_that_help_shows_are_a_dozen() -> None:
    shown = [param for param in cli.commands["predict"].params if type(param) is click.Option]
    dozen = "out preset chunk_length fdr relaxed threshold esm_model dnabert_model head devices threads force"
    assert [param.name for param in shown] == [*dozen.split(), "help_all"]


def test_the_parameters_of_the_deployments_are_frozen() -> None:
    assert flow_parameters() == json.loads(FLOW_PARAMETERS.read_text())


def test_every_text_that_users_see_is_in_one_file() -> None:
    assert texts().splitlines() == TEXTS.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    COMMAND_LINE.write_text(command_line())
    TEXTS.write_text(texts(), encoding="utf-8")
    FLOW_PARAMETERS.write_text(json.dumps(flow_parameters(), indent=1, sort_keys=True) + "\n")
