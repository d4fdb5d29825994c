"""The doctor: silent faults become lines with a mend, and a sound installation has none."""

import importlib.metadata
import json
import os

import pytest
from packaging.requirements import Requirement

from treecp_rl import cli, doctor
from treecp_rl.doctor import (
    Finding,
    Report,
    directory_finding,
    examine,
    load_finding,
    package_finding,
    render,
    visible_device_findings,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_fault_has_a_mend_and_fails_the_report():
    report = Report((Finding("a", "ok", "fine"), Finding("b", "fault", "broken", "mend it")))
    assert not report.healthy
    assert "FAULT b" in render(report)
    assert "-> mend it" in render(report)
    assert json.loads(json.dumps(report.as_json()))["healthy"] is False


def test_missing_and_wrong_packages_are_faults():
    missing = package_finding(Requirement("no-such-package-here>=2"))
    assert (missing.status, missing.mend) == ("fault", 'pip install "no-such-package-here>=2"')
    wrong = package_finding(Requirement("numpy>=1000"))
    assert wrong.status == "fault"
    assert ">=1000 is needed" in wrong.detail
    assert package_finding(Requirement("numpy")).status == "ok"


def test_plugin_that_cannot_be_imported_shows_the_last_line(tmp_path, monkeypatch):
    """verl reports this at DEBUG level only."""
    (tmp_path / "broken_plugin_of_a_test.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = importlib.metadata.EntryPoint("treecp", "broken_plugin_of_a_test:register", doctor.PLUGIN_GROUP)
    finding = load_finding(point)
    assert finding.status == "fault"
    assert "No module named 'a_package_that_is_missing'" in finding.detail
    assert finding.mend.endswith("pip install a-package-that-is-missing")


def test_missing_entry_point_is_a_fault(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    (finding,) = doctor._plugin()
    assert finding.status == "fault"
    assert "not installed in this environment" in finding.detail


@pytest.mark.parametrize(
    ("environment", "count", "faults"),
    [
        ({}, 0, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}, 2, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2,3"}, 4, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, 0),
    ],
)
def test_visible_devices(environment, count, faults):
    findings = list(visible_device_findings(environment, count))
    assert len(findings) == faults
    assert all(finding.status == "fault" and finding.mend for finding in findings)


def test_directory_that_does_not_exist_yet_is_fine(tmp_path):
    assert directory_finding("checkpoints", tmp_path / "a" / "b").status == "ok"


def test_directory_that_cannot_be_written_is_a_fault():
    finding = directory_finding("checkpoints", doctor.Path("/proc/nowhere"))
    assert finding.status == "fault"
    assert finding.mend


def test_a_check_that_breaks_is_a_fault_and_the_others_go_on(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'x_y'", name="x_y")

    monkeypatch.setattr(doctor, "_attention", broken)
    report = examine(start_ray=False)
    by_check = {finding.check: finding for finding in report.findings}
    assert by_check["attention"].status == "fault"
    assert by_check["attention"].mend.endswith("pip install x-y")
    assert by_check["config"].status == "note"


def test_config_against_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    good = {finding.check: finding for finding in doctor._config(["trainer.n_gpus_per_node=2"])}
    assert good["resources"].status == "ok"
    few = {finding.check: finding for finding in doctor._config(["ray_kwargs.ray_init.num_cpus=2"])}
    assert few["resources"].status == "fault"
    assert "ray_kwargs.ray_init.num_cpus" in few["resources"].detail
    for override in ("trainer.backend=treepc", "trainer.no_such_key=1"):
        (finding,) = doctor._config([override])
        assert finding.status == "fault"
        assert override.split("=")[0].split(".")[-1] in finding.detail


@pytest.mark.slow
def test_doctor_from_the_command_line(monkeypatch, capsys):
    """This environment, a local Ray and the plugin inside its worker; the one test that starts Ray here."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code = cli.main(["doctor", "--json", "trainer.backend=treecp"])
    report = json.loads(capsys.readouterr().out)
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert report["healthy"] is (code == 0)
    assert by_check["plugin, this process"]["status"] == "ok"
    if by_check["ray"]["status"] == "fault" and os.getloadavg()[0] > 4 * (os.cpu_count() or 1):
        pytest.skip(f"Ray gives a node 30 s to start, the machine is overloaded: {by_check['ray']['detail']}")
    assert by_check["plugin, Ray worker"]["status"] == "ok", by_check
    assert code == 0, [finding for finding in report["findings"] if finding["status"] == "fault"]
