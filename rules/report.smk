# What people look at: `snakemake --report report.html`, `snakemake plan`, `snakemake status`.
#
# Scripts: scripts/report. Curves come from the step log, data from the phases' indices; the overview
# is one page with everything, the figures can also be looked at one by one.
rule plot_data:
    """Draws the lengths of documents and the rank curve."""
    input:
        [INDEX.format(phase=phase) for phase in PHASES],
    output:
        figures("Data"),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/plot_data.log",
    conda:
        "../envs/python.yaml"
    params:
        folder=subpath(output[0], parent=True),
    shell:
        "exec python -m scripts.report.plot_data --index {input:q} --output-dir {params.folder:q}"
        " > {log:q} 2>&1"


rule plot_training:
    """Draws loss, learning rate, gradient and throughput over all phases."""
    input:
        [MARKER.format(phase=phase) for phase in PHASES],
    output:
        figures("Training"),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/plot_training.log",
    conda:
        "../envs/python.yaml"
    params:
        steps=STEPS,
        folder=subpath(output[0], parent=True),
    shell:
        "exec python -m scripts.report.plot_training --steps {params.steps:q}"
        " --output-dir {params.folder:q} > {log:q} 2>&1"


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


rule phase_samples:
    """Continues the same prompts with the model of each phase but the last."""
    input:
        markers=[MARKER.format(phase=phase) for phase in PHASES[:-1]],
        model=MODEL,
        tokenizer=ancient(TOKENIZER_FILES),
    output:
        f"{REPORT}/phase_samples.json",
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/phase_samples.log",
    conda:
        "../envs/python.yaml"
    params:
        tokenizer=lambda wildcards, input: Path(input.tokenizer[0]).parent,
    shell:
        "exec python -m scripts.report.phase_samples --marker {input.markers:q}"
        " --model {input.model:q}"
        " --tokenizer {params.tokenizer:q}"
        " --output {output:q} > {log:q} 2>&1"


rule overview:
    """Puts figures and tables into one page."""
    input:
        markers=[MARKER.format(phase=phase) for phase in PHASES],
        indices=[INDEX.format(phase=phase) for phase in PHASES],
        orders=[ORDER_INSPECTION.format(phase=phase) for phase in PHASES],
        figures=[f"{REPORT}/{name}.svg" for name in FIGURES],
        verdict=VERDICT,
        held_out=HELD_OUT,
        benchmarks=[file for file in SCORES if file != HELD_OUT],
        samples=[f"{REPORT}/phase_samples.json", GENERATIONS],
    output:
        report(
            OVERVIEW,
            caption="../docs/report/overview.rst",
            category="All on one page",
            labels={"what": "data, training, model"},
        ),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/overview.log",
    conda:
        "../envs/python.yaml"
    resources:
        settings=canonical_json(config),
    params:
        figures=lambda wildcards, input: Path(input.figures[0]).parent,
        # No inputs: a run need not have been inspected.
        inspections=[
            f"{INSPECTION}/summary.json".format(phase=phase) for phase in PHASES
        ],
    shell:
        "exec python -m scripts.report.page --config {resources.settings:q}"
        " --figures {params.figures:q}"
        " --verdict {input.verdict:q}"
        " --held-out {input.held_out:q}"
        " --benchmarks {input.benchmarks:q}"
        " --samples {input.samples:q}"
        " --inspection {params.inspections:q}"
        " --order {input.orders:q}"
        " --output {output:q} > {log:q} 2>&1"


rule report:
    input:
        OVERVIEW,
        SHARDS,
    localrule: True
    message:
        "Figures and tables are drawn; snakemake --report report.html puts them into one page."


for _question, _answer in {
    "plan": "Says what is left to do, how long it takes and what it needs.",
    "status": "Says whether the run is healthy; fails if it is not.",
}.items():

    rule:
        name:
            _question
        log:
            f"{ARTIFACTS}/logs/{config['train_name']}/{_question}.log",
        localrule: True
        conda:
            "../envs/python.yaml"
        params:
            script=f"scripts.report.{_question}",
            settings=all_settings,
        message:
            _answer
        shell:
            "python -m {params.script} --config {params.settings:q} | tee {log:q}"


rule watch:
    """Shows conversions and training while they go on in another Snakemake."""
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/watch.log",
    localrule: True
    conda:
        "../envs/python.yaml"
    params:
        settings=all_settings,
    message:
        "Ctrl-C leaves the view, not the run."
    shell:
        "exec python -m scripts.report.watch --config {params.settings:q} 2> {log:q}"
