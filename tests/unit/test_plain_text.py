"""Names and messages from input files are made harmless; ordinary ones are unchanged."""

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.errors import InputError
from virnuc_core.plain_text import (
    LONGEST_NAME,
    cell_text,
    hide_secrets_in_logs,
    plain_name,
    visible,
    without_secrets,
)

ORDINARY = """
    contig_1 NODE_1_length_5/2 sp|P12345|X_HUMAN read#0/1 a=b x-1 5'UTR a"b a,b a;b chr1:5-9(+),x=1 C:\\x ../x gène
    配列 100% %1B _=1 #1 <b>
"""


@pytest.mark.parametrize("name", ["", *ORDINARY.split()])
def test_ordinary_names_stay(name: str) -> None:
    assert plain_name(name) == name
    assert cell_text(name) == name


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("=1+1", "%3D1+1"),
        ("\uff1d1", "%EF%BC%9D1"),
        ('a,=HYPERLINK("x"),b', 'a,%3DHYPERLINK("x"),b'),
        ("a;-1;@b", "a;%2D1;%40b"),
        ("\x1b[2Jx", "%1B[2Jx"),
        ("a\0b\x7f", "a%00b%7F"),
        ("a\x9bm", "a%C2%9Bm"),
        ("a\u202eb", "a%E2%80%AEb"),
        ("a\ud800", "a%ED%A0%80"),
        ("a\tb\nc\r", "a%09b%0Ac%0D"),
    ],
)
def test_what_could_do_harm_is_written_in_hex(name: str, written: str) -> None:
    assert plain_name(name) == written
    assert cell_text(name) == written


def test_long_names_are_cut_at_a_whole_letter() -> None:
    assert plain_name("a" * 5000) == "a" * LONGEST_NAME
    assert plain_name("x" + "\U0001f9ec" * 5000) == "x" + "\U0001f9ec" * ((LONGEST_NAME - 1) // 4)


def test_a_message_keeps_its_line_ends() -> None:
    assert visible("a\n\x1b[2Jb\r") == "a\n%1B[2Jb%0D"
    assert str(InputError("\x1b]0;owned\x07.fa is missing\nhere")) == "%1B]0;owned%07.fa is missing\nhere"


@given(st.text("a,;=+-@'\"\t\n\uff1d"))
def test_no_part_of_a_name_begins_a_formula_wherever_a_spreadsheet_splits(name: str) -> None:
    for part in re.split("[,;\t]", cell_text(name)):
        assert part[:1] not in tuple("=+-@\uff1d\uff0b\uff0d\uff20'\"")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pass@host:5000/a", "http://host:5000/a"),
        ("see (https://host/x?X-Amz-Signature=a%2F) and", "see (https://host/x?...) and"),
        ("s3://bucket/key is 'http://u:p@w@host'", "s3://bucket/key is 'http://host'"),
        ("postgresql://mlflow:Zk3/PW+8=@host/db", "postgresql://host/db"),
        ("postgresql://mlflow:1/?#@host/db and http://a:b/c@host", "postgresql://host/db and http://host"),
        ("http://host:8080/m@1 s3://bucket/a@b.fa", "http://host:8080/m@1 s3://bucket/a@b.fa"),
        ("a@b.c://d", "a@b.c://d"),
        ("why? http://host/ said so", "why? http://host/ said so"),
    ],
)
def test_secrets_of_urls_are_left_out(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_log_lines_of_other_libraries_hold_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    hide_secrets_in_logs()
    hide_secrets_in_logs()
    with caplog.at_level(logging.INFO):
        logging.getLogger("httpx").info(
            "HTTP Request: %s %s", "GET", "http://user:password@host/x?token=secret"
        )
        try:
            raise ValueError("no answer from http://user:password@host")
        except ValueError:
            logging.getLogger("prefect").exception("Encountered an exception")
    assert "http://host/x?..." in caplog.text
    assert "no answer from http://host" in caplog.text
    assert "password" not in caplog.text
