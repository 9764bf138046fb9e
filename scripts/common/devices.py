"""What GPUs can do at best, by their data sheets."""

PEAK_TFLOPS = {  # dense bf16
    "A100": 312,
    "A800": 312,
    "H20": 148,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "B200": 2250,
}


def peak_tflops(device: str) -> int | None:
    """Returns the dense bf16 TFLOP/s of a device by torch's name for it; None of an unknown one."""
    known = max((name for name in PEAK_TFLOPS if name in device), key=len, default=None)
    return PEAK_TFLOPS.get(known)
