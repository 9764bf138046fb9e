# How good the exported model is: held-out text of each phase, and benchmarks.
#
# Settings: config.yaml `evaluate`. Scripts: scripts/evaluate.
rule held_out:
    """Measures loss and bits per byte on the documents that each phase holds out."""
    input:
        export=EXPORT,
        verdict=VERDICT,
        indices=[INDEX.format(phase=phase) for phase in PHASES],
    output:
        HELD_OUT,
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/held_out.log",
    conda:
        "../envs/python.yaml"
    params:
        documents=config["evaluate"]["held_out_documents"],
    shell:
        "exec python -m scripts.evaluate.held_out --export {input.export:q}"
        " --index {input.indices:q}"
        " --max-documents {params.documents}"
        " --output {output:q} > {log:q} 2>&1"


rule benchmarks:
    """Scores the model with lm-evaluation-harness."""
    input:
        export=EXPORT,
        verdict=VERDICT,
    output:
        BENCHMARKS,
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/benchmarks.log",
    conda:
        "../envs/python.yaml"
    params:
        tasks=config["evaluate"]["tasks"],
    shell:
        "exec python -m scripts.evaluate.benchmarks --export {input.export:q}"
        " --tasks {params.tasks:q} --output {output:q} > {log:q} 2>&1"


rule evaluate:
    input:
        SCORES,
    localrule: True
    message:
        "The model is evaluated."
