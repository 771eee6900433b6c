"""The file: one, whole, with nothing to fetch and nothing that its data could do."""

import io
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from tests.made_reports import MadeContig, island, write_run
from virnuc_core.results.report.html import write_json, write_report_page

HOSTILE = "</script><script>alert(1)</script><!--&amp;\u2028'\""


def page_of(root: Path, made: list[MadeContig]) -> str:
    folder, document = write_run(root, made)
    write_report_page(folder, document)
    return folder.page.read_text()


def test_json_in_a_page_is_json_without_markup() -> None:
    text = io.StringIO()
    write_json({"name": HOSTILE, HOSTILE: [None, 0.5]}, text)
    assert json.loads(text.getvalue()) == {"name": HOSTILE, HOSTILE: [None, 0.5]}
    assert text.getvalue().isascii()
    assert not set("<>&") & set(text.getvalue())


def test_nothing_is_fetched_and_only_its_own_script_may_run(tmp_path: Path) -> None:
    page = page_of(tmp_path, [island("one")])
    assert (
        re.findall(r"https?://|//\w+\.|@import|\burl\(|\bsrc=|<link|<iframe|innerHTML|\beval\(", page) == []
    )
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        [source] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = b64encode(sha256(source.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_names_cannot_leave_their_place(tmp_path: Path) -> None:
    root = tmp_path / "{{data}}<b>{{script}}"
    root.mkdir()
    page = page_of(root, [MadeContig(name=HOSTILE, p_virus=(0.9,))])
    assert page.count("<script") == 2
    assert "<title>{{data}}&lt;b&gt;{{script}}: virnuc report</title>" in page
    [data] = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(data)["contigs"]["name"] == [HOSTILE]
    assert "<h1>1 of 1 contig is called viral.</h1>" in page


def test_it_is_written_whole(tmp_path: Path) -> None:
    page_of(tmp_path, [island("one")])
    assert not list(tmp_path.glob(".*"))
