"""Memory, disks, caches and bundled models."""

from pathlib import Path

import pytest

from virnuc_core.doctor.host import bundled_findings, cache_findings, host_findings
from virnuc_core.env_config import reload
from virnuc_core.models.catalogue import BUNDLED_HEADS


def test_a_fit_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "not" / "yet"))
    reload()
    findings = {finding.name: finding for finding in host_findings()}
    assert set(findings) >= {"open files", "working folder", "VIRNUC_HOME", "temporary folder"}
    assert "GB free in" in findings["VIRNUC_HOME"].found
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("home", ["file/home", "/proc/nowhere"])
def test_a_home_that_cannot_be_written(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / home))
    reload()
    [found] = [finding for finding in host_findings() if finding.name == "VIRNUC_HOME"]
    assert found.state == "problem"
    assert "cannot be written" in found.found
    assert "VIRNUC_HOME" in found.advice


def test_caches_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    reload()
    (tmp_path / "compiled" / "inductor" / "a").mkdir(parents=True)
    (tmp_path / "compiled" / "inductor" / "a" / "code").write_bytes(b"0" * 3_000_000)
    findings = {finding.name: finding.found for finding in cache_findings()}
    assert findings["code compiled by torch"] == f"0.003 GB in {tmp_path / 'compiled' / 'inductor'}"


def test_bundled_models_are_whole() -> None:
    findings = list(bundled_findings())
    assert [finding.name for finding in findings] == ["esm2:tiny", "dnabert:tiny", *BUNDLED_HEADS]
    assert all(finding.state == "ok" and "fingerprint" in finding.found for finding in findings)
