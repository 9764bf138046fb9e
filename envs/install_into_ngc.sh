#!/usr/bin/env bash
# Installs the pinned requirements into NVIDIA's PyTorch image; Dockerfile and apptainer.def run it.
#
#   install_into_ngc.sh REQUIREMENTS
#
# The image's own torch, CUDA libraries and Transformer Engine stay: what would replace them is left
# out, and nothing is installed that REQUIREMENTS does not name.
set -euo pipefail

of_the_image='^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)=='
torch_before=$(python -c 'import torch; print(torch.__version__)')

# The image pins packages of its own by PIP_CONSTRAINT, older than some of ours.
grep -vE "$of_the_image" "$1" |
    PIP_CONSTRAINT='' python -m pip install --no-cache-dir --no-deps --requirement /dev/stdin

python - "$torch_before" <<'CHECK'
import sys

import fastokens, megatron.core, megatron.training, pyarrow, snakemake, torch, transformers

if torch.__version__ != sys.argv[1]:
    sys.exit(f"torch {sys.argv[1]} of the image was replaced by {torch.__version__}")
if torch.ones(2).numpy().sum() != 2:
    sys.exit("torch and numpy do not fit together")
CHECK
