"""`virnuc report`: rewrites the report of a finished run."""

import json
from pathlib import Path

from tests.end_to_end.conftest import CommandLine
from tests.made_plans import PLAN
from tests.made_reports import island, many_contigs, write_run
from virnuc_core.inference.plan import write_plan
from virnuc_core.results.run_json import records_of


def test_the_command_writes_it_anew_with_classes(virnuc: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder, document = write_run(tmp_path / "run", [island("one"), *many_contigs(3)])
    refused = virnuc("report", folder.root)
    assert refused.code == 3
    write_plan(folder.plan, PLAN)
    assert virnuc("report", folder.root).code == 3
    tables = [path for path in folder.results if path.exists()]
    folder.report.write_text(json.dumps({**document, "files": records_of(tables)}))
    labels = tmp_path / "labels.tsv"
    labels.write_text("one\tbacteria\ncontig_1\tphage\n")
    result = virnuc("report", folder.root, "--labels", labels, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["report"] == str(folder.page)
    assert '"bacteria","phage"' in folder.page.read_text()
    recorded = {file["name"]: file["size"] for file in json.loads(folder.report.read_text())["files"]}
    assert recorded["report.html"] == folder.page.stat().st_size
    before = folder.report.read_bytes()
    contigs = folder.contigs.read_text()
    folder.contigs.write_text(contigs.replace("\tother\t", "\tvirus\t", 1))
    changed = virnuc("report", folder.root)
    assert changed.code == 4
    assert str(folder.contigs) in changed.err
    assert str(folder.predictions) not in changed.err
    assert folder.report.read_bytes() == before
    folder.contigs.write_text(contigs)
    labels.write_text("one\n")
    assert virnuc("report", folder.root, "--labels", labels).code == 3
    assert virnuc("report", folder.root, "--labels", tmp_path / "absent").code == 3
    folder.report.write_text("{}")
    assert virnuc("report", folder.root).code == 2
