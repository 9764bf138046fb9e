# Data from the hub: source tables, Parquet files, tokenizer. A folder needs none of this, but may
# have source tables too.
#
# Settings: hub.*, recipe.{source,tokenizer}, runtime.{keep_parquet,parallel_downloads}; HF_ENDPOINT
# names a mirror, HF_TOKEN a token. Scripts: scripts/data/{source_manifest,download_kaiyuan,tokenizer}.py.
HUB = config["hub"]
FROM_HUB = RECIPE["source"] == "hub"
DROPS_PARQUET = FROM_HUB and not config["runtime"]["keep_parquet"]

# Not an output: a table is replaced only by `scripts/data/source_manifest.py --update`, while Snakemake
# deletes outputs before it runs a rule again.
LIST_FILES = "exec python -m scripts.data.source_manifest --parquet {PARQUET:q} --phase {params.phases}"
if FROM_HUB:
    LIST_FILES += (
        " --repository {HUB[dataset]:q} --revision {HUB[dataset_revision]:q}"
        " --folder {HUB[dataset_folder]:q}"
    )

if "downloads" not in workflow.global_resources:
    workflow.register_resource("downloads", config["runtime"]["parallel_downloads"])


def listed_digest(wildcards):
    """The content that the source table lists for a file; another one is downloaded again."""
    listed = phase_files(wildcards.phase).sources.get(wildcards.shard)
    return listed.sha256 if listed else ""


def missing_parquet(phase):
    """The Parquet files of a phase that are still to be downloaded."""
    if DROPS_PARQUET:
        raise WorkflowError(
            "runtime.keep_parquet is false: Parquet files are dropped after conversion. "
            f"`snakemake converted_phase{phase}` downloads what it needs"
        )
    try:
        missing = phase_files(phase).missing_parquet()
    except (FileNotFoundError, ValueError) as error:
        raise WorkflowError(str(error))
    workflow.dag.forcefiles.update(missing)  # a torn file is there and still missing
    return missing


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
        shell:
            "exec python -m scripts.data.download_kaiyuan --phase {wildcards.phase}"
            " --parquet {PARQUET:q} {wildcards.shard:q}.parquet > {log:q} 2>&1"


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
            repository=HUB["model"],
            revision=HUB["model_revision"],
        shell:
            "exec python -m scripts.data.tokenizer fetch --tokenizer {TOKENIZER:q}"
            " --repository {params.repository:q} --revision {params.revision:q} > {log:q} 2>&1"


for _phase in PHASES:

    rule:
        name:
            f"manifest_phase{_phase}"
        localrule: True
        conda:
            "../envs/python.yaml"
        params:
            phases=_phase,
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
    localrule: True
    conda:
        "../envs/python.yaml"
    params:
        phases=list(PHASES),
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


onsuccess:
    if DROPS_PARQUET:
        for phase in PHASES:
            phase_files(phase).drop_converted_parquet()
