"""Loads an exported model with transformers."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

Logits = Callable[[torch.Tensor], torch.Tensor]  # tokens [batch, length] → logits [… , vocabulary]


def load_model(
    export: Path, dtype: torch.dtype | str = "auto", device: str | None = None
) -> PreTrainedModel:
    """Loads a model for inference.

    Args:
        export: folder made by export.py.
        dtype: of the weights; "auto" keeps the export's.
        device: "cuda" or "cpu"; None takes a GPU if there is one.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return AutoModelForCausalLM.from_pretrained(export, dtype=dtype).to(device).eval()


def hf_logits(model: PreTrainedModel) -> Logits:
    """Returns a function from tokens to the logits of every position."""

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(tokens.to(model.device), use_cache=False).logits

    return compute
