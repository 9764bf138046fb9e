# The training run: one rule for all phases, each of which goes on where the one before it ended.
#
# Settings: runtime.*, scripts/params/<model>. Scripts: scripts/train. A phase's only output is its
# marker, which the launcher writes when the last iteration is reached; checkpoints are no outputs,
# since Snakemake deletes the outputs of jobs that fail.
rule train:
    """Trains one phase, or resumes it from its latest good checkpoint."""
    input:
        train_input,
        tokenizer=ancient(TOKENIZER_FILES),
    output:
        MARKER,
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/phase{{phase}}.log",
    benchmark:
        f"{ARTIFACTS}/logs/{config['train_name']}/phase{{phase}}.benchmark.tsv"
    priority: 100
    conda:
        "../envs/python.yaml"
    container:
        None
    threads: 1
    resources:
        **train_resources(),
        # How it is run stands here, since a change of a resource makes nothing run again.
        settings=canonical_json(config["runtime"]),
        train_name=config["train_name"],
        artifacts=ARTIFACTS,
        tokenizer=TOKENIZER,
        index=lambda wildcards: training_index(int(wildcards.phase)),
        later_phases=later_phases,
    params:
        recipe=train_recipe,
    shell:
        "exec {resources.on_each_node} python -m scripts.train.launch --phase {wildcards.phase}"
        " --train-name {resources.train_name:q}"
        " --artifacts {resources.artifacts:q}"
        " --index {resources.index:q}"
        " --tokenizer {resources.tokenizer:q}"
        " --recipe {params.recipe:q}"
        " --runtime {resources.settings:q}"
        " --later-phases {resources.later_phases:q}"
        " --gpus $(({resources.gpu} / {resources.nodes}))"
        " --log {log:q}"
        " --marker {output:q}"


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


rule preflight:
    """Looks, on the nodes that training will use, at what would stop it or slow it down."""
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/preflight.log",
    conda:
        "../envs/python.yaml"
    container:
        None
    threads: 1
    resources:
        **train_resources(),
        model=MODEL,
        artifacts=ARTIFACTS,
        tokenizer=TOKENIZER,
    shell:
        "{resources.on_each_node} python -m scripts.train.preflight"
        " --model {resources.model:q}"
        " --tokenizer {resources.tokenizer:q}"
        " --artifacts {resources.artifacts:q}"
        " --gpus $(({resources.gpu} / {resources.nodes}))"
        " --nodes {resources.nodes}"
        " 2>&1 | tee {log:q}"
