"""Megatron's command line, from the recipe (what a run is) and the runtime (how it is run).

Whatever is not settled here, a user can give as extra arguments, which come last.
"""

import importlib.util
import os
import shlex

from scripts.train.identity import read_record
from scripts.train.layers.choice import Choice, choose
from scripts.train.phases import Plan
from scripts.train.run import Run, RunError

# What Megatron cannot do without CUDA kernels.
CPU_ARGUMENTS = shlex.split(
    "--distributed-backend gloo --use-cpu-initialization "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --disable-jit-fuser --num-workers 0"
)

GPU_ARGUMENTS = shlex.split("--distributed-backend nccl --overlap-grad-reduce --log-throughput")

# Optimizer states sharded over the GPUs, in checkpoints that any number of GPUs can load.
SHARDED_OPTIMIZER_ARGUMENTS = shlex.split(
    "--use-distributed-optimizer --overlap-param-gather --dist-ckpt-optim-fully-reshardable "
    "--ckpt-fully-parallel-load"
)
ASYNCHRONOUS_SAVE_ARGUMENTS = shlex.split(
    "--async-save --async-strategy mcore --use-persistent-ckpt-worker"
)

# The rate is scripts/train/schedule.py's. Megatron's own must be the same in all phases, since it
# keys the optimizer's parameter groups by it.
COMMON_ARGUMENTS = shlex.split(
    "--lr 1 --min-lr 1 --lr-decay-style constant --weight-decay-incr-style constant "
    "--tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 "
    "--dataloader-type single --ckpt-format torch_dist --dist-ckpt-strictness raise_all "
    "--verify-integrity --exit-signal-handler --no-one-logger --no-check-for-nan-in-loss-and-grad "
    "--rerun-mode disabled --log-interval 100"
)

# What obeys the masks of documents: Megatron's own layers a full mask, ours cumulative lengths.
LAYERS_OF_MASKS = {"reset_attention_mask": "local", "dataloader_inter_document_masking": "fast"}

PRECISIONS = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp32": []}


def flags(settings: dict) -> list[str]:
    """Spells settings whose keys are Megatron's argument names; false and None are left out."""
    result = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            result.append(flag)
        elif isinstance(value, list):
            result += [flag, *map(str, value)] if value else []
        elif value is not False and value is not None:
            result += [flag, str(value)]
    return result


def megatron_arguments(recipe: dict, runtime: dict, plan: Plan, run: Run) -> list[str]:
    """Returns the arguments of scripts/train/pretrain.py that are Megatron's own."""
    hparams = recipe["hparams"]
    on_gpus = runtime["gpus"] > 0
    return [
        *COMMON_ARGUMENTS,
        *(_on_gpus(runtime, run) if on_gpus else CPU_ARGUMENTS),
        *chosen_layers(runtime, plan).arguments,
        *flags(recipe["model"]),
        *flags({"vocab_size": recipe["model"]["padded_vocab_size"]}),
        *flags(hparams["optimizer"]),
        *PRECISIONS[hparams["precision"]],
        *_training(hparams, runtime, plan),
        *_masks(plan),
        *_records(runtime, run),
        *_extra(runtime),
    ]


def _extra(runtime: dict) -> list[str]:
    """Returns what the user adds."""
    return shlex.split(f"{runtime.get('extra_arguments', '')} {os.environ.get('EXTRA_ARGS', '')}")


def _training(hparams: dict, runtime: dict, plan: Plan) -> list[str]:
    """Returns the arguments that say what is trained, how far, and in which batches."""
    return flags(
        {
            "seq_length": hparams["sequence_length"],
            "global_batch_size": hparams["global_batch_size"],
            "micro_batch_size": runtime["micro_batch_size"],
            "seed": hparams["seed"],
            "init_method_std": hparams["init_method_std"],
            "train_samples": plan.last_iteration * hparams["global_batch_size"],
            "phase_transition_iterations": ",".join(map(str, plan.transitions)) or None,
            "eval_interval": hparams["validation"]["interval"],
            "eval_iters": plan.validation_iterations,
            "tensor_model_parallel_size": runtime.get("tensor_parallel", 1),
            "pipeline_model_parallel_size": runtime.get("pipeline_parallel", 1),
            "iterations_to_skip": runtime.get("skip_iterations", []),
        }
    )


def _masks(plan: Plan) -> list[str]:
    """Returns the arguments that say what a token sees; a full mask only where one is needed."""
    needs_mask = plan.masks["reset_attention_mask"]
    return flags(plan.masks | {"no_create_attention_mask_in_dataloader": not needs_mask})


def _records(runtime: dict, run: Run) -> list[str]:
    """Returns the arguments that say what is written where and when."""
    settings = {
        "save": run.checkpoints,
        "load": run.checkpoints,
        "save_interval": runtime["checkpoint_interval"],
        "tensorboard_dir": run.tensorboard,
    }
    if runtime.get("wandb_project"):
        settings |= {
            "wandb_project": runtime["wandb_project"],
            "wandb_exp_name": run.name,
            "wandb_save_dir": run.logs,
        }
    return flags(settings)


def _on_gpus(runtime: dict, run: Run) -> list[str]:
    """Returns what only GPUs can do."""
    return [
        *GPU_ARGUMENTS,
        *(SHARDED_OPTIMIZER_ARGUMENTS if shards_optimizer(run) else []),
        *(ASYNCHRONOUS_SAVE_ARGUMENTS if runtime.get("async_save", True) else []),
    ]


def shards_optimizer(run: Run) -> bool:
    """Says whether Transformer Engine was installed when the run began, or is as it begins.

    A sharded optimizer cannot load a whole one's checkpoint, nor the other way round.
    """
    begun = read_record(run)["phases"].get("1")
    if begun is None:
        return importlib.util.find_spec("transformer_engine") is not None
    return begun["environment"]["transformer-engine"] is not None


def chosen_layers(runtime: dict, plan: Plan) -> Choice:
    """Returns the layers that runtime.layers asks for.

    Each of the two ways to keep documents apart is obeyed by some layers only.
    """
    requested = runtime.get("layers", "auto")
    needed = {name: layers for name, layers in LAYERS_OF_MASKS.items() if plan.masks[name]}
    if len(needed) > 1:
        raise RunError(f"data.yaml: {' and '.join(needed)} do the same: set one of them to false")
    for name, layers in needed.items():
        if requested not in ("auto", layers):
            raise RunError(
                f"data.yaml: {name} is not obeyed by layers: {requested}: set runtime.layers to "
                f"{layers}"
            )
        if layers == "fast" and runtime.get("pipeline_parallel", 1) > 1:
            raise RunError(
                f"data.yaml: {name} is not possible with pipeline_parallel: set it to 1, or use "
                "reset_attention_mask"
            )
        requested = layers
    return choose(requested, runtime["gpus"], runtime.get("tensor_parallel", 1))
