"""Continues prompts with a model, for eyes: greedy, so that models can be compared.

    python scripts/release/generate.py --export MODEL_DIR --prompts PROMPTS --output FILE.json
    python scripts/release/generate.py --checkpoint RUN/iter_0000100 \\
        --model scripts/params/qwen3_1p7b/model.yaml --tokenizer data/tokenizer --output FILE.json

PROMPTS is a text file with one prompt a line, or a JSON list of strings (for prompts of several
lines); scripts/release/prompts.json is the default. A checkpoint is exported into a temporary
folder first. Runs on a GPU if there is one.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from scripts.common.files import read_json, write_json
from scripts.release.architecture import Architecture
from scripts.release.arguments import (
    add_checkpoint_or_export,
    parse_checkpoint_or_export,
    parser_of,
)
from scripts.release.checkpoint import Checkpoint
from scripts.release.export import export, read_export
from scripts.release.hf_model import load_model

PROMPTS = Path(__file__).with_name("prompts.json")


class PromptsError(ValueError):
    """A file of prompts cannot be used; the message says why."""


def read_prompts(file: Path) -> list[str]:
    """Reads prompts: a JSON list of strings if the name ends with .json, else one a line."""
    if not file.is_file():
        raise PromptsError(f"{file} does not exist")
    prompts = read_json(file) if file.suffix == ".json" else file.read_text("utf-8").splitlines()
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise PromptsError(f"{file} is not a JSON list of strings")
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise PromptsError(f"{file} holds no prompt")
    return prompts


def generate(folder: Path, prompts: list[str], max_new_tokens: int) -> list[dict[str, Any]]:
    """Continues each prompt greedily with the exported model of a folder.

    Returns:
        For each prompt: prompt, continuation, tokens (how many were generated) and
        finished (whether the model ended the document itself).
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(folder)
    end_id = model.generation_config.eos_token_id
    continuations = []
    for prompt in tqdm(prompts, unit="prompt", desc="generate", disable=None):
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        continuations.append(
            {
                "prompt": prompt,
                "continuation": tokenizer.decode(new_ids, skip_special_tokens=True),
                "tokens": len(new_ids),
                "finished": new_ids[-1:] == [end_id],
            }
        )
    return continuations


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    add_checkpoint_or_export(parser)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="continuations, JSON")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    return parse_checkpoint_or_export(parser, argv)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.export or Path(temporary) / "model"
        try:
            prompts = read_prompts(arguments.prompts)
            if arguments.checkpoint:
                export(
                    Checkpoint(arguments.checkpoint),
                    Architecture.read(arguments.model),
                    arguments.tokenizer,
                    folder,
                    end_of_document=arguments.end_of_document,
                )
            provenance = read_export(folder)
        except (ValueError, OSError) as error:
            sys.exit(f"generate: {error}")
        continuations = generate(folder, prompts, arguments.max_new_tokens)
    result = {
        "checkpoint": provenance["checkpoint"],
        "iteration": provenance["iteration"],
        "max_new_tokens": arguments.max_new_tokens,
        "continuations": continuations,
    }
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
