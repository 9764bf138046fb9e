"""The real training loop keeps documents apart, in both ways that data.yaml offers."""

import pytest

from tests.train.small_run import SmallRun


@pytest.fixture
def trained(data, tmp_path):
    """Returns a function that trains five iterations with a mask; it gives the step log's steps."""

    def train(**masks):
        run = SmallRun(data, tmp_path / "-".join(["run", *masks]))
        run.parameters["data"] |= masks
        run.parameters["data"]["phases"][0]["length"] = {"iterations": 5}
        code, output = run.launch(1)
        assert code == 0, output
        return run.steps()

    return train


def test_cumulative_lengths_and_a_full_mask_train_alike(trained):
    by_lengths = trained(dataloader_inter_document_masking=True)
    by_mask = trained(reset_attention_mask=True)
    assert by_lengths.keys() == by_mask.keys() == set(range(1, 6))
    for iteration, (loss, grad_norm, _) in by_lengths.items():
        assert loss == pytest.approx(by_mask[iteration][0], rel=1e-5)
        assert grad_norm == pytest.approx(by_mask[iteration][1], rel=1e-3)
