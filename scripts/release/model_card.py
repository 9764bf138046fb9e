"""Writes the model card: what the model is, what it was trained on, how good it is, what deviates.

    python scripts/release/model_card.py --export MODEL_DIR --model scripts/params/M/model.yaml \\
        --markers artifacts/run_state/NAME/phase*.json \\
        --manifests data/converted/megatron_phase*.manifest.parquet \\
        --verification MODEL_DIR.verified.json --held-out held_out.json \\
        --benchmarks benchmarks.json --output card.md

Every number comes from a file that another step wrote. The card is also put into the exported
folder as README.md, where the Hugging Face hub looks for it. --held-out and --benchmarks may be
left out.
"""

import sys
from pathlib import Path
from typing import Any

from scripts.common.files import read_json, replacing
from scripts.data.phase_manifest import read_manifest
from scripts.release.architecture import Architecture
from scripts.release.arguments import EXPORT, MODEL, parser_of
from scripts.release.export import read_export

FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
language: [en, zh]
tags: [pretrained, qwen3, megatron-lm]
---
"""
DEVIATIONS = [
    "Kaiyuan-2B as released has sandwich norm (a norm before and after each sub-layer) and a tanh"
    " soft-cap on its logits, whose value is not published. This model has neither: it is a plain"
    " Qwen3, so that every engine runs it.",
    "Kaiyuan-2B was trained in FP16; the precision here is a setting of hparams.yaml.",
    "Optimizer settings, warm-up, the initialisation, the tokens of each phase and the token that"
    " ends a document are not published. The values used are marked `unverified` in"
    " scripts/params and config.yaml.",
]
USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", device_map="auto")
inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

It is a base model: it continues text and has not been taught to answer or to refuse.
"""


def card(
    provenance: dict[str, Any],
    architecture: Architecture,
    markers: list[dict[str, Any]],
    manifests: list[Path],
    verification: dict[str, Any],
    held_out: dict[str, Any] | None,
    benchmarks: dict[str, Any] | None,
) -> str:
    """Returns the card, Markdown with the hub's front matter.

    Args:
        provenance: export.json of the model.
        architecture: of the model.
        markers: of the phases, in order.
        manifests: files of the phases' manifests, in order.
        verification: verify_export.py's verdict.
        held_out: held_out.py's results, if any.
        benchmarks: benchmarks.py's results, if any.
    """
    name = markers[-1]["train_name"]
    sections = [
        f"{FRONT_MATTER}\n# {name}\n",
        model_section(provenance, architecture),
        data_section(markers, manifests),
        verification_section(verification),
        evaluation_section(held_out, benchmarks),
        "## Deviations from Kaiyuan-2B\n\n" + "\n".join(f"- {line}" for line in DEVIATIONS) + "\n",
        USE,
    ]
    return "\n".join(section for section in sections if section)


def model_section(provenance: dict[str, Any], architecture: Architecture) -> str:
    """Says what the model is."""
    heads = f"{architecture.num_attention_heads} / {architecture.num_query_groups}"
    rows = [
        ("parameters", f"{provenance['parameters']:,}"),
        (
            "layers / hidden / FFN",
            f"{architecture.num_layers} / {architecture.hidden_size} / "
            f"{architecture.ffn_hidden_size}",
        ),
        (
            "attention heads / key-value heads / head dimension",
            f"{heads} / {architecture.head_dim}",
        ),
        (
            "vocabulary rows",
            f"{architecture.vocab_size:,} ({'tied' if architecture.tied_embeddings else 'untied'})",
        ),
        ("context", f"{architecture.max_position_embeddings:,} tokens"),
        ("RoPE base", f"{architecture.rotary_base:,.0f}"),
        ("weights", provenance["dtype"]),
    ]
    averaged = provenance["averaged"]
    origin = (
        f"The average of the checkpoints of iterations {', '.join(map(str, averaged))}."
        if averaged
        else f"The checkpoint of iteration {provenance['iteration']}."
    )
    return f"A Qwen3-shaped language model. {origin}\n\n{table(['', ''], rows)}"


def data_section(markers: list[dict[str, Any]], manifests: list[Path]) -> str:
    """Says what each phase read: the lineage in short."""
    rows = []
    for marker, file in zip(markers, manifests, strict=True):
        manifest = read_manifest(file)
        rows.append(
            (
                marker["phase"],
                f"{marker['first_iteration']:,} … {marker['last_iteration']:,}",
                f"{marker['tokens']:,}",
                len(manifest),
                f"{manifest.documents:,}",
                f"`{marker['data_digest'][:16]}`",
            )
        )
    total = sum(marker["tokens"] for marker in markers)
    last = markers[-1]
    header = ["phase", "iterations", "tokens trained on", "shards", "documents", "data digest"]
    return (
        f"## Training\n\n{total:,} tokens in {last['last_iteration']:,} iterations of "
        f"{last['global_batch_size']:,} sequences of {last['sequence_length']:,} tokens, "
        f"by Megatron-LM.\n\n{table(header, rows)}\n"
        "The digest stands for the phase's shards, their order and their samples.\n"
    )


def verification_section(verdict: dict[str, Any]) -> str:
    """Says that the exported model is the trained one, or that it is not."""
    result = "computes" if verdict["passed"] else "DOES NOT compute"
    texts = ", ".join(f"{text['name']} ({text['tokens']} tokens)" for text in verdict["texts"])
    return (
        f"## Verification\n\ntransformers' Qwen3ForCausalLM {result} what Megatron computes from "
        f"{verdict['checkpoint']}: over all positions of {texts}, in {verdict['compared_in']}, the "
        f"largest difference of a logit is {verdict['max_abs_error']:.2g}, and "
        f"{verdict['argmax_agreement']:.2%} of the most likely tokens agree.\n"
    )


def evaluation_section(held_out: dict[str, Any] | None, benchmarks: dict[str, Any] | None) -> str:
    """Gives held-out losses and benchmark scores, as far as they were measured."""
    parts = []
    if held_out:
        rows = [
            (
                group["name"],
                f"{group['loss']:.4f}",
                f"{group['bits_per_byte']:.4f}",
                f"{group['tokens']:,}",
            )
            for group in held_out["groups"]
        ]
        parts.append(table(["held-out text", "loss (nats a token)", "bits a byte", "tokens"], rows))
    if benchmarks:
        rows = [
            (task, scores["metric"], scores["few_shot"], f"{scores['score']:.2f}")
            for task, scores in benchmarks["tasks"].items()
        ]
        parts.append(table(["benchmark", "metric", "few-shot", "score (%)"], rows))
        published = ", ".join(
            f"{model} {average:.2f}" for model, average in benchmarks["published_averages"].items()
        )
        parts.append(
            f"Average: {benchmarks['average']:.2f}. Averages that Kaiyuan-2B's authors published, "
            f"over a benchmark set that they do not name: {published}.\n"
        )
    return "## Evaluation\n\n" + "\n".join(parts) if parts else ""


def table(header: list[str], rows: list[tuple]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--export", type=Path, required=True, help=EXPORT)
    parser.add_argument("--model", type=Path, required=True, help=MODEL)
    parser.add_argument("--markers", type=Path, nargs="+", required=True, help="of all phases")
    parser.add_argument("--manifests", type=Path, nargs="+", required=True, help="of all phases")
    parser.add_argument("--verification", type=Path, required=True, help="verify_export's verdict")
    parser.add_argument("--held-out", type=Path, help="held_out.py's results")
    parser.add_argument("--benchmarks", type=Path, help="benchmarks.py's results")
    parser.add_argument("--output", type=Path, required=True, help="Markdown")
    arguments = parser.parse_args(argv)
    try:
        text = card(
            read_export(arguments.export),
            Architecture.read(arguments.model),
            [read_json(marker) for marker in arguments.markers],
            arguments.manifests,
            read_json(arguments.verification),
            read_json(arguments.held_out) if arguments.held_out else None,
            read_json(arguments.benchmarks) if arguments.benchmarks else None,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"model_card: {error}")
    for file in (arguments.export / "README.md", arguments.output):
        with replacing(file) as partial:
            partial.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
