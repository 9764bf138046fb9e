"""`snakemake profile`: which points of the sweep a run measures."""

POINTS = "smoke/artifacts/profile/cpu_smoke/points"


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
