# Figures and tables of `snakemake --report report.html`.
#
# Scripts: scripts/report. The curves come from the step log, the shards from the phase manifests.
LOSS = f"{ARTIFACTS}/report/loss.svg"
LEARNING_RATE = f"{ARTIFACTS}/report/learning_rate.svg"
SHARDS = f"{ARTIFACTS}/report/shards.csv"


rule plot_training:
    """Draws loss and learning rate over all phases."""
    input:
        [MARKER.format(phase=phase) for phase in PHASES],
    output:
        loss=report(
            LOSS,
            caption="../docs/report/loss.rst",
            category="Training",
            labels={"what": "loss"},
        ),
        learning_rate=report(
            LEARNING_RATE,
            caption="../docs/report/learning_rate.rst",
            category="Training",
            labels={"what": "learning rate"},
        ),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/plot_training.log",
    conda:
        "../envs/python.yaml"
    shell:
        "exec python -m scripts.report.plot_training --steps {STEPS:q} --loss {output.loss:q}"
        " --learning-rate {output.learning_rate:q} > {log:q} 2>&1"


rule shard_table:
    """Lists all shards with documents, tokens and bytes."""
    input:
        [MANIFEST.format(phase=phase) for phase in PHASES],
    output:
        report(
            SHARDS,
            caption="../docs/report/shards.rst",
            category="Data",
            labels={"what": "shards and tokens"},
        ),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/shard_table.log",
    conda:
        "../envs/python.yaml"
    shell:
        "exec python -m scripts.report.shard_table --manifest {input:q} --output {output:q}"
        " > {log:q} 2>&1"


rule report:
    input:
        LOSS,
        LEARNING_RATE,
        SHARDS,
        GENERATIONS,
    localrule: True
    message:
        "Figures and tables are drawn; snakemake --report report.html puts them into one page."
