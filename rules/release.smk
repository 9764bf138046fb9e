# The trained model as people use it: Hugging Face folder, proof of equality, sample text.
#
# Scripts: scripts/release. The export counts as done when the verdict file exists, and that is
# written only if transformers' logits equal Megatron's.
rule export_hf:
    """Writes the last checkpoint as a Hugging Face model."""
    input:
        marker=rules.train_all.input,
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
    shell:
        "exec python -m scripts.release.export --checkpoint {input.marker:q} --model {input.model:q}"
        " --tokenizer {params.tokenizer:q} --output {output:q} > {log:q} 2>&1"


rule verify_export:
    """Compares the exported model's logits with Megatron's at every position."""
    input:
        marker=rules.train_all.input,
        model=MODEL,
        tokenizer=ancient(TOKENIZER_FILES),
        export=EXPORT,
    output:
        VERDICT,
    log:
        f"{ARTIFACTS}/logs/{config['train_name']}/verify_export.log",
    conda:
        "../envs/python.yaml"
    params:
        tokenizer=tokenizer_folder,
    shell:
        "exec python -m scripts.release.verify_export --checkpoint {input.marker:q}"
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


rule export:
    input:
        VERDICT,
    localrule: True
    message:
        "The model is exported and equal to the trained one."
