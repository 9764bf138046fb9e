# The trained model as people use it: averaged, exported, proved equal, evaluated, described.
#
# Settings: hparams.yaml `averaging`, config.yaml `evaluate`. Scripts: scripts/release. The export
# counts as done when the verdict file exists, which is written only if transformers' logits equal
# Megatron's.
rule average:
    """Averages the last checkpoints of the run."""
    input:
        rules.train_all.input,
    output:
        directory(AVERAGE),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/average.log",
    conda:
        "../envs/python.yaml"
    params:
        run=lambda wildcards, output: output[0].removesuffix("_average"),
        last=AVERAGING["checkpoints"],
        every=AVERAGING["interval"],
    shell:
        "exec python -m scripts.release.average --run {params.run:q} --last {params.last}"
        " --every {params.every} --output {output:q} > {log:q} 2>&1"


rule export_hf:
    """Writes the released checkpoint as a Hugging Face model."""
    input:
        checkpoint=RELEASED,
        model=MODEL,
        tokenizer=ancient(TOKENIZER_FILES),
    output:
        directory(EXPORT),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/export.log",
    conda:
        "../envs/python.yaml"
    params:
        tokenizer=tokenizer_folder,
        dtype=EXPORT_DTYPE,
        end_of_document=RECIPE["end_of_document"],
    shell:
        "exec python -m scripts.release.export --checkpoint {input.checkpoint:q} --model {input.model:q}"
        " --tokenizer {params.tokenizer:q} --end-of-document {params.end_of_document:q}"
        " --dtype {params.dtype} --output {output:q} > {log:q} 2>&1"


rule verify_export:
    """Compares the exported model's logits with Megatron's at every position."""
    input:
        checkpoint=RELEASED,
        model=MODEL,
        tokenizer=ancient(TOKENIZER_FILES),
        export=EXPORT,
    output:
        VERDICT,
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/verify_export.log",
    conda:
        "../envs/python.yaml"
    resources:
        # Two models in fp32, 8 bytes a parameter, and their logits of a long text.
        mem_mb=max(
            config["cluster"]["memory_mb"],
            14 * parameters(PARAMETERS["model"]) // 1_000_000,
        ),
    params:
        tokenizer=tokenizer_folder,
    shell:
        "exec python -m scripts.release.verify_export --checkpoint {input.checkpoint:q}"
        " --model {input.model:q} --tokenizer {params.tokenizer:q} --export {input.export:q}"
        " --output {output:q} > {log:q} 2>&1"


rule generate:
    """Continues a few prompts with the exported model, for a person to read."""
    input:
        verdict=VERDICT,
        model=EXPORT,
        prompts=f"{ROOT}/scripts/release/prompts.json",
    output:
        report(
            GENERATIONS,
            caption="../docs/report/generations.rst",
            category="Model",
            labels={"what": "continued prompts"},
        ),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/generate.log",
    conda:
        "../envs/python.yaml"
    shell:
        "exec python -m scripts.release.generate --export {input.model:q}"
        " --prompts {input.prompts:q} --output {output:q} > {log:q} 2>&1"


rule model_card:
    """Describes the model from the files that the other steps wrote."""
    input:
        export=EXPORT,
        model=MODEL,
        markers=[MARKER.format(phase=phase) for phase in PHASES],
        manifests=[MANIFEST.format(phase=phase) for phase in PHASES],
        verdict=VERDICT,
        scores=SCORES,
    output:
        report(
            MODEL_CARD,
            caption="../docs/report/model_card.rst",
            category="Model",
            labels={"what": "model card"},
        ),
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/model_card.log",
    conda:
        "../envs/python.yaml"
    params:
        benchmarks=lambda wildcards, input: [
            f"--benchmarks={path}" for path in input.scores[1:]
        ],
    shell:
        "exec python -m scripts.release.model_card --export {input.export:q}"
        " --model {input.model:q}"
        " --markers {input.markers:q}"
        " --manifests {input.manifests:q}"
        " --verification {input.verdict:q}"
        " --held-out {input.scores[0]:q} {params.benchmarks:q}"
        " --output {output:q} > {log:q} 2>&1"


rule export:
    input:
        VERDICT,
        MODEL_CARD,
    localrule: True
    message:
        "The model is exported and equal to the trained one."
