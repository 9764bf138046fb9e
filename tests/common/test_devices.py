"""Peak rates by the names that torch gives to devices."""

import pytest

from scripts.common.devices import peak_tflops


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_a_devices_peak_is_its_data_sheets_and_no_alike_ones(device, peak):
    assert peak_tflops(device) == peak
