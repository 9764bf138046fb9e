"""`snakemake profile`: which points of the sweep a run measures."""

import json
import os

from scripts.profiling.point import DEFAULTS

POINTS = "smoke/artifacts/profile/cpu_smoke/points"
NSYS = """#!/bin/sh
# In the place of Nsight Systems: runs the command and writes the report.
while [ "$1" != python ]; do
    [ "$1" = --output ] && report=$2
    shift
done
"$@" && echo traced > "$report"
"""


def test_only_points_without_a_result_are_measured(checkout):
    planned = checkout.planned("profile")
    assert planned == {"profile": 1, "profile_point": 2, "profile_report": 1, "profile_trace": 1}
    done = checkout.path / POINTS / "layers=fast,micro_batch_size=4.json"
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    assert checkout.planned("profile")["profile_point"] == 1


def test_an_unknown_setting_of_the_sweep_is_named(checkout):
    sweep = checkout.path / "scripts/params/cpu_smoke/profiling.yaml"
    sweep.write_text(sweep.read_text().replace("micro_batch_size", "micro_batchsize"))
    output = checkout.smoke("profile", "--dry-run", succeeds=False)
    assert "did you mean micro_batch_size" in output


def test_nsight_traces_the_recommended_point_where_it_is_installed(checkout, tmp_path, monkeypatch):
    folder = checkout.path / "smoke/artifacts/profile/cpu_smoke"
    folder.mkdir(parents=True)
    (folder / "recommended.json").write_text(json.dumps(DEFAULTS | {"micro_batch_size": 4}))
    command = ("profile_nsight", "--allowed-rules", "profile_nsight")
    checkout.smoke(*command, succeeds=False)
    assert "install Nsight Systems" in (folder / "logs/nsight.log").read_text()
    nsys = tmp_path / "bin/nsys"
    nsys.parent.mkdir()
    nsys.write_text(NSYS)
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", str(nsys.parent), prepend=os.pathsep)
    checkout.smoke(*command)
    assert (folder / "nsight.nsys-rep").read_text() == "traced\n"
    assert json.loads((folder / "logs/nsight.json").read_text())["status"] == "measured"
