"""Says where the milliseconds of a traced step go, by what the kernels do.

    python scripts/profiling/breakdown.py --kernels DIR/kernels.json --output breakdown.md

kernels.json comes from point.py --trace-dir. A kernel belongs to the first group whose pattern is
in its name; on a CPU the operators' names take the kernels' place.
"""

import argparse
import re
from pathlib import Path

from scripts.common.files import read_json, replacing

GROUPS = {
    "attention": r"sdpa|flash|fmha|fused_attn|cudnn::fusion|attention|softmax_warp",
    "cross entropy": r"cross_entropy|log_softmax|nll_loss",
    "matrix products": r"nvjet|gemm|gemv|cutlass|cublas|aten::(add)?b?mm|LinearFunction",
    "QK-norm and rotation": r"qk_norm_rope|rope|rotary",
    "RMSNorm and residual": r"norm",
    "SwiGLU": r"swiglu|silu",
    "optimizer and clipping": r"multi_tensor_apply|[Aa]dam",
    "embedding": r"embedding|compute_grad_weight|sum_and_scatter|gather|radix",
    "communication": r"nccl|gloo",
    "copies, adds, fills": r"elementwise|copy|[Mm]emset|[Mm]emcpy|fill|reduce|aten::(add|mul|zero)",
}


def group_of(kernel: str) -> str:
    """Returns the group of a kernel's name."""
    return next((group for group, sign in GROUPS.items() if re.search(sign, kernel)), "other")


def breakdown(kernels: list[dict]) -> dict[str, tuple[float, int]]:
    """Returns milliseconds and calls of every group, the largest first."""
    totals: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        milliseconds, calls = totals.get(group := group_of(kernel["name"]), (0.0, 0))
        totals[group] = (milliseconds + kernel["milliseconds"], calls + kernel["calls"])
    return dict(sorted(totals.items(), key=lambda item: -item[1][0]))


def table(kernels: list[dict], largest: int = 20) -> str:
    """Returns the groups and the largest kernels as Markdown."""
    groups = breakdown(kernels)
    total = sum(milliseconds for milliseconds, _ in groups.values())
    lines = ["| what | ms a step | share | kernels |", "|---|---|---|---|"]
    lines += [
        f"| {group} | {milliseconds:.1f} | {milliseconds / total:.1%} | {calls:,} |"
        for group, (milliseconds, calls) in groups.items()
    ]
    lines += [f"| all | {total:.1f} | | |", "", "| kernel | ms a step | calls |", "|---|---|---|"]
    lines += [
        f"| `{kernel['name'][:90]}` | {kernel['milliseconds']:.2f} | {kernel['calls']} |"
        for kernel in kernels[:largest]
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=Path, required=True, help="from point.py --trace-dir")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    with replacing(options.output) as path:
        path.write_text(table(read_json(options.kernels)))


if __name__ == "__main__":
    main()
