"""Settings are defined in one place: a field added to virnuc_core/settings.py is in every interface."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import inspect, json, os, sys, types
from pathlib import Path

path = Path("virnuc_core/settings.py").resolve()
anchor = "    repr_layer: CountFromZero"
source = path.read_text()
assert source.count(anchor) == 1
field = '    made_setting: int = Field(default=7, description="Made for a test")\\n'
module = types.ModuleType("virnuc_core.settings")
module.__file__ = str(path)
sys.modules[module.__name__] = module
exec(compile(source.replace(anchor, field + anchor), str(path), "exec"), module.__dict__)

from prefect.utilities.callables import parameter_schema

from flows.on_demand import predict as flow
from scripts.render.settings import settings_table
from virnuc_cli.main import cli
from virnuc_cli.sources import reading
from virnuc_core import api

def read():
    with reading(module.PredictSettings, {}) as settings:
        return settings.made_setting

[option] = [param for param in cli.commands["predict"].params if param.name == "made_setting"]
os.chdir(sys.argv[1])
Path("virnuc.toml").write_text("made-setting = 9\\n")
from_file = read()
os.environ["VIRNUC_MADE_SETTING"] = "10"
schema = parameter_schema(flow).model_dump()["definitions"]["PredictSettings"]["properties"]["made_setting"]
print(json.dumps({
    "flag": [option.opts[0], option.metavar, option.help],
    "variable": read(),
    "file": from_file,
    "flow parameter": [schema["default"], schema["description"]],
    "API": [inspect.signature(function).parameters["made_setting"].default for function in (api.predict, api.embed)],
    "planner": module.predict_config(module.PredictSettings(made_setting=8)).made_setting,
    "MLflow": module.PredictSettings().params["made_setting"],
    "docs": "`--made-setting N`" in settings_table(None),
}))
"""


def test_a_new_field_is_in_every_interface(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "flag": ["--made-setting", "N", "Made for a test [7]."],
        "variable": 10,
        "file": 9,
        "flow parameter": [7, "Made for a test"],
        "API": [7, 7],
        "planner": 8,
        "MLflow": 7,
        "docs": True,
    }
