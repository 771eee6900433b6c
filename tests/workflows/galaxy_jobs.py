"""What Galaxy does with a tool and its `<tests>`, by Galaxy's own library: run by the Python of the environment `galaxy`.

galaxy_jobs.py cases  TOOL                       the tests: parameters with defaults, outputs expected, as JSON
galaxy_jobs.py render TOOL < PARAMETERS          the command line for parameters
galaxy_jobs.py verify DATASET < EXPECTATIONS     fails unless a dataset is as a test expects it
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galaxy.tool_util.parameters import fill_static_defaults, input_models_for_tool_source
from galaxy.tool_util.parameters.case import test_case_state
from galaxy.tool_util.parser import get_tool_source
from galaxy.tool_util.verify import verify
from galaxy.util.template import fill_template


@dataclass(frozen=True)
class Dataset:
    """What a command line sees of an input: its path as text, its format and its name in the history."""

    path: str
    ext: str
    element_identifier: str

    def __str__(self) -> str:
        return self.path


def cases(tool: str) -> list[dict[str, Any]]:
    """Gives for each `<test>` its parameters, and by name the outputs with path in the job's folder and expectations."""
    source = get_tool_source(tool)
    models, profile = input_models_for_tool_source(source), source.parse_profile()
    outputs = source.parse_outputs(None)[0]
    found = []
    for test in source.parse_tests_to_dict()["tests"]:
        state = test_case_state(test, models.parameters, profile, validate=True)
        parameters = fill_static_defaults(dict(state.tool_state.input_state), models, profile)
        expected = {output["name"]: output["attributes"] for output in test["outputs"]}
        made = {
            name: output.from_work_dir
            for name, output in outputs.items()
            if all(eval(condition.text, {}, dict(parameters)) for condition in output.filters)
        }
        found.append(
            {
                "parameters": parameters,
                "expected": expected,
                "made": made,
                "count": int(test["expect_num_outputs"]),
            }
        )
    return found


def render(tool: str, parameters: dict[str, Any]) -> str:
    """Gives the command line of a job, as Galaxy on one line; a dataset is `{"class": "File", "path", "filetype", "name"}`."""
    template = get_tool_source(tool).parse_command()
    return fill_template(template, context=_wrapped(parameters)).replace("\n", " ").strip()


def _wrapped(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("class") == "File":
        return Dataset(value["path"], value["filetype"], value["name"])
    return {name: _wrapped(inner) for name, inner in value.items()}


def main(action: str, path: str) -> None:
    """Does one of the three."""
    if action == "cases":
        json.dump(cases(path), sys.stdout)
    elif action == "render":
        print(render(path, json.load(sys.stdin)))
    else:
        verify(path, Path(path).read_bytes(), json.load(sys.stdin))


main(*sys.argv[1:])
