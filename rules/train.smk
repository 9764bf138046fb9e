# The training run: one rule for all phases, each of which goes on where the one before it ended.
#
# Settings: runtime.*, scripts/params/<model>. Scripts: scripts/train. A phase's only output is its
# marker, which the launcher writes when the last iteration is reached; checkpoints are no outputs,
# since Snakemake deletes the outputs of jobs that fail.
from scripts.report.pending import training_in_words
from scripts.train.run import Run

RUN = Run(config["train_name"], Path(ARTIFACTS))
RUNTIME = canonical_json(config["runtime"])
MARKER = f"{ARTIFACTS}/run_state/{config['train_name']}/phase{{phase}}.json"


def train_recipe(wildcards):
    """What the phase's result depends on, as one string: Snakemake compares params as a set."""
    return canonical_json(phase_recipe(PARAMETERS, int(wildcards.phase)))


def is_trained(phase, recipe):
    """Whether the phase is complete under this recipe; then its shards no longer matter."""
    marker = Path(MARKER.format(phase=phase))
    return marker.exists() and read_json(marker)["recipe_digest"] == digest(recipe)


def train_input(wildcards):
    """The marker of the phase before, and the phase's index unless the phase is complete."""
    phase = int(wildcards.phase)
    before = [MARKER.format(phase=phase - 1)] if phase > 1 else []
    if is_trained(phase, phase_recipe(PARAMETERS, phase)):
        return before
    say(training_in_words(RUN, phase))
    return [*before, INDEX.format(phase=phase)]


rule train:
    """Trains one phase, or resumes it from its latest good checkpoint."""
    input:
        train_input,
    output:
        MARKER,
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/phase{{phase}}.log",
    benchmark:
        f"{ARTIFACTS}/logs/{config['train_name']}/phase{{phase}}.benchmark.tsv"
    priority: 100
    conda:
        "../envs/python.yaml"
    threads: 1
    resources:
        **train_resources(),
    params:
        recipe=train_recipe,
        index=lambda wildcards: INDEX.format(phase=wildcards.phase),
    shell:
        "exec {ON_EACH_NODE} python -m scripts.train.launch --phase {wildcards.phase}"
        " --train-name {config[train_name]:q}"
        " --artifacts {ARTIFACTS:q}"
        " --index {params.index:q}"
        " --tokenizer {TOKENIZER:q}"
        " --recipe {params.recipe:q}"
        " --runtime {RUNTIME:q}"
        " --gpus $(({resources.gpu} / {resources.nodes}))"
        " --marker {output:q}"
        " > {log:q} 2>&1"


for _phase in PHASES:

    rule:
        name:
            f"train_phase{_phase}"
        input:
            MARKER.format(phase=_phase),
        localrule: True
        message:
            "The phase is trained."


rule train_all:
    input:
        MARKER.format(phase=PHASES[-1]),
    localrule: True
    message:
        "All phases are trained."
