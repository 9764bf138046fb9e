"""Training speed on one GPU: our layers beside Megatron's, Transformer Engine and transformers.

    python benchmarks/train_throughput.py [--model qwen3_1p7b] [--repeats 2] [--output FILE.md]
    python benchmarks/train_throughput.py --only FP8 transformers      # some of them

All train the same model on the same random tokens with the same global batch, one after the other,
each in a process of its own; every contender runs `--repeats` times. Rates use Megatron's count of
operations. A contender that is not installed, or that runs out of memory, is a row that says so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from scripts.common.files import replacing
from scripts.common.settings import load_parameters
from scripts.profiling.point import DEFAULTS, WARM_UP_STEPS, machine, measure, outcome_of_failure
from scripts.report.speed import flops_per_token

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = {
    "Megatron, local layers": {"layers": "local", "micro_batch_size": 1},
    "Megatron + Transformer Engine, micro batch 4": {
        "layers": "transformer_engine",
        "micro_batch_size": 4,
    },
    "Megatron + Transformer Engine, micro batch 8": {
        "layers": "transformer_engine",
        "micro_batch_size": 8,
    },
    "Megatron + Transformer Engine, micro batch 4, FP8": {
        "layers": "transformer_engine",
        "micro_batch_size": 4,
        "fp8": True,
    },
    "Megatron, this project's layers, micro batch 4": {"layers": "fast", "micro_batch_size": 4},
    "Megatron, this project's layers, micro batch 8": {"layers": "fast", "micro_batch_size": 8},
}
PEERS = {f"transformers + SDPA + torch.compile, micro batch {size}": size for size in (2, 4)}


def train_peer(
    parameters: dict, device: str, steps: int, global_batch_size: int, micro_batch_size: int
) -> dict:
    """Trains transformers' Qwen3 as its users would.

    fp32 weights under bf16 autocast, SDPA, torch.compile, fused AdamW, gradient accumulation.

    Returns:
        seconds, of each step, and peak_memory_gib.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model, length = parameters["model"], parameters["hparams"]["sequence_length"]
    config = Qwen3Config(
        vocab_size=model["padded_vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_hidden_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_query_groups"],
        head_dim=model["kv_channels"],
        max_position_embeddings=model["max_position_embeddings"],
        rms_norm_eps=model["norm_epsilon"],
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        peer = Qwen3ForCausalLM(config)
    step_model = torch.compile(peer) if device == "cuda" else peer
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    micro_batches = global_batch_size // micro_batch_size
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        for _ in range(micro_batches):
            shape = (micro_batch_size, length)
            tokens = torch.randint(config.vocab_size, shape, device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = step_model(input_ids=tokens, labels=tokens).loss / micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0
    return {"seconds": seconds, "peak_memory_gib": memory}


def peer_record(options: argparse.Namespace, micro_batch_size: int) -> dict:
    """Runs the peer in a process of its own, whose memory is free afterwards."""
    command = [sys.executable, __file__, "--model", options.model, "--gpus", str(options.gpus)]
    command += ["--steps", str(options.steps), "--peer", str(micro_batch_size)]
    command += ["--global-batch-size", str(options.global_batch_size)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        return outcome_of_failure(result.stderr, result.returncode)
    report = json.loads(result.stdout.splitlines()[-1])
    parameters = load_parameters(options.model)
    length = parameters["hparams"]["sequence_length"]
    step = statistics.median(report["seconds"][WARM_UP_STEPS:])
    rate = options.global_batch_size * length / step
    tflops = rate * flops_per_token(parameters["model"], length) / 1e12
    return {"status": "measured", "tokens_per_second": rate, "tflops": tflops, **report}


def megatron_record(options: argparse.Namespace, settings: dict) -> dict:
    """Measures one of Megatron's contenders."""
    settings = {**DEFAULTS, "global_batch_size": options.global_batch_size, **settings}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        return measure(
            load_parameters(options.model), settings, options.gpus, options.steps, log, []
        )


def row(name: str, records: list[dict]) -> str:
    """Returns a contender's row: its best run, and the spread of its runs."""
    measured = [record for record in records if record["status"] == "measured"]
    if not measured:
        status = records[0]["status"]
        return f"| {name} | {records[0].get('error', status)[:80]} | | | | |"
    best = max(measured, key=lambda record: record["tflops"])
    spread = best["tflops"] - min(record["tflops"] for record in measured)
    loss = f"{best['losses'][-1]:.4f}" if "losses" in best else ""
    return (
        f"| {name} | {best['tflops']:.4g} | {spread:.2g} | {best['tokens_per_second']:,.0f}"
        f" | {best['peak_memory_gib']:.0f} GiB | {loss} |"
    )


def repeated(name: str, repeats: int, record: Callable[[], dict]) -> list[dict]:
    """Runs a contender again and again; its row so far goes to standard error."""
    records = []
    for _ in range(repeats):
        records.append(record())
        print(row(name, records), file=sys.stderr, flush=True)
    return records


def main(argv: list[str] | None = None) -> None:
    """Prints the table, and writes it to --output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3_1p7b", help="a folder of scripts/params")
    parser.add_argument("--gpus", type=int, default=1, choices=[0, 1], help="0: the CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of contenders' names")
    parser.add_argument("--output", type=Path, help="Markdown")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)  # its micro batch
    options = parser.parse_args(argv)
    if options.peer:
        parameters = load_parameters(options.model)
        device = "cuda" if options.gpus else "cpu"
        sizes = options.steps, options.global_batch_size, options.peer
        print(json.dumps(train_peer(parameters, device, *sizes)))
        return

    contenders = {
        **{name: partial(megatron_record, options, each) for name, each in CONTENDERS.items()},
        **{name: partial(peer_record, options, size) for name, size in PEERS.items()},
    }
    chosen = [name for name in contenders if any(part in name for part in options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no such contender among {', '.join(contenders)}")
    records = {name: repeated(name, options.repeats, contenders[name]) for name in chosen}
    lines = [
        f"{options.model}, global batch {options.global_batch_size}, {machine()}",
        "",
        "| | TFLOP/s a GPU | spread | tokens/s a GPU | memory | last loss |",
        "|---|---|---|---|---|---|",
        *(row(name, runs) for name, runs in records.items()),
    ]
    print("\n".join(lines))
    if options.output:
        with replacing(options.output) as path:
            path.write_text("\n".join(lines) + "\n")
    if all(record["status"] != "measured" for runs in records.values() for record in runs):
        parser.exit(1, "No contender could be measured.\n")


if __name__ == "__main__":
    main()
