# Data from the hub: source tables, Parquet files, tokenizer. A folder needs none of this, but may
# have source tables too.
#
# Settings: hub.*, recipe.{source,tokenizer}, runtime.{keep_parquet,parallel_downloads}; HF_ENDPOINT
# names a mirror, HF_TOKEN a token. Scripts: scripts/data/{source_manifest,download_kaiyuan,tokenizer}.py.
# Not an output: a table is replaced only by `scripts/data/source_manifest.py --update`, while Snakemake
# deletes outputs before it runs a rule again.
LIST_FILES = (
    "python -m scripts.data.source_manifest --parquet {params.parquet:q} --phase {params.phases}"
    " {params.repository} 2>&1 | tee {log:q}"
)

if FROM_HUB:

    rule download:
        """Downloads one Parquet file and compares it with the source table."""
        output:
            (
                temp(f"{PARQUET}/phase{{phase}}/{{shard}}.parquet")
                if DROPS_PARQUET
                else f"{PARQUET}/phase{{phase}}/{{shard}}.parquet"
            ),
        log:
            f"{ARTIFACTS}/logs/download/phase{{phase}}/{{shard}}.log",
        retries: 3 if workflow.is_main_process else 0
        conda:
            "../envs/python.yaml"
        resources:
            downloads=1,
        params:
            sha256=listed_digest,
            parquet=subpath(output[0], ancestor=2),
        shell:
            "exec python -m scripts.data.download_kaiyuan --phase {wildcards.phase}"
            " --parquet {params.parquet:q} {wildcards.shard:q}.parquet > {log:q} 2>&1"


if RECIPE["tokenizer"] == "hub":

    rule fetch_tokenizer:
        """Downloads the tokenizer's four files."""
        output:
            TOKENIZER_FILES,
        log:
            f"{ARTIFACTS}/logs/fetch_tokenizer.log",
        retries: 3 if workflow.is_main_process else 0
        conda:
            "../envs/python.yaml"
        resources:
            downloads=1,
        params:
            folder=subpath(output[0], parent=True),
            repository=HUB["model"],
            revision=HUB["model_revision"],
        shell:
            "exec python -m scripts.data.tokenizer fetch --tokenizer {params.folder:q}"
            " --repository {params.repository:q} --revision {params.revision:q} > {log:q} 2>&1"


for _phase in PHASES:

    rule:
        name:
            f"manifest_phase{_phase}"
        log:
            f"{ARTIFACTS}/logs/source/phase{_phase}.log",
        localrule: True
        conda:
            "../envs/python.yaml"
        params:
            phases=_phase,
            parquet=PARQUET,
            repository=lambda wildcards: REPOSITORY,  # keeps {phase} as it is
        message:
            "Listing the phase's files; a table that is there already is compared, not replaced."
        shell:
            LIST_FILES

    rule:
        name:
            f"download_phase{_phase}"
        input:
            partial(lambda phase, wildcards: missing_parquet(phase), _phase),
        localrule: True
        message:
            "All Parquet files of the phase are there."


rule manifest_all:
    log:
        f"{ARTIFACTS}/logs/source/all.log",
    localrule: True
    conda:
        "../envs/python.yaml"
    params:
        phases=list(PHASES),
        parquet=PARQUET,
        repository=lambda wildcards: REPOSITORY,  # keeps {phase} as it is
    message:
        "Listing the files of all phases; tables that are there already are compared, not replaced."
    shell:
        LIST_FILES


rule download_all:
    input:
        lambda wildcards: [file for phase in PHASES for file in missing_parquet(phase)],
    localrule: True
    message:
        "All Parquet files of all phases are there."


def drop_converted_parquet():
    """Drops what is left of files that Snakemake was to drop when it was killed."""
    if DROPS_PARQUET:
        for phase in PHASES:
            phase_files(phase).drop_converted_parquet()
