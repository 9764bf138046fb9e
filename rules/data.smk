# From Parquet to the phases' indices: raw files, tokenizer, shards, manifests, order.
#
# Settings: recipe.*, paths.{parquet,tokenizer,converted}, scripts/params/<model>/data.yaml.
# Scripts: scripts/data. Every Parquet file becomes one shard (.bin, .idx, .json), which is a target of
# its own; lists of shards leave out what is finished (scripts/data/shards.py says what that is).
import shlex

from scripts.data.shards import configured_phase, configured_recipe
from scripts.report.pending import conversion_in_words

RECIPE = config["recipe"]
TOKENIZER_FACTS = f"{CONVERTED}/tokenizer.json"
TOKENIZER_FILES = [
    f"{TOKENIZER}/{name}"
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
]
SHARD = f"{CONVERTED}/megatron_phase{{phase}}/phase{{phase}}_{{shard}}_{RECIPE['text_key']}_document"
MANIFEST = CONVERTED + "/megatron_phase{phase}.manifest.parquet"
INDEX = CONVERTED + "/megatron_phase{phase}.index.json"
CONVERSION = shlex.join(  # put together once, not by each of 50,000 jobs
    [
        *("--tokenizer-model", TOKENIZER),
        *("--text-key", RECIPE["text_key"]),
        *("--end-of-document", RECIPE["end_of_document"]),
        *("--special-tokens-in-text", RECIPE["special_tokens_in_text"]),
        *("--invalid-utf8", RECIPE["invalid_utf8"]),
        *("--tokenizer-engine", config["runtime"]["tokenizer_engine"]),
    ]
)


@cache
def phase_files(phase):
    """Where the files of a phase lie."""
    return configured_phase(config, int(phase))


def wants_finished_shards():
    """Whether lists are to be complete: --forcerun convert, --forceall, --touch, --summary and such."""
    settings = workflow.dag_settings
    return (
        settings.forceall
        or bool({"convert", "download"} & set(settings.forcerun))
        or workflow.touch
        or workflow.executor_plugin is None  # nothing is to be executed, only told
    )


def remove_links_to_nothing(files):
    """Removes what Snakemake cannot handle: it neither finds such a file nor takes it for missing."""
    links = [
        file for file in files if os.path.islink(file) and not os.path.exists(file)
    ]
    if links and workflow.dryrun:
        raise WorkflowError(
            f"{len(links)} files are links to nothing, such as {links[0]}: mount the disk that they "
            "point to; a run that is no dry run removes the links and makes the files again"
        )
    for link in links:
        os.unlink(link)


@cache
def stale_shards(phase):
    """The shards to convert, by their .idx; forced, since Snakemake may see no reason to."""
    ignore_changed_input_lists()
    files = phase_files(phase)
    try:
        stale = files.stale_shards(configured_recipe(config))
    except (FileNotFoundError, ValueError) as error:
        raise WorkflowError(str(error))
    say(conversion_in_words(files, stale))
    remove_links_to_nothing(file for shard in stale for file in files.files(shard))
    indexes = [files.file(shard, "idx") for shard in stale]
    if not workflow.touch:
        workflow.dag.forcefiles.update(indexes)
        if stale and RECIPE["source"] == "hub":
            torn = set(files.missing_parquet())
            workflow.dag.forcefiles.update(torn & {files.raw(shard) for shard in stale})
    if wants_finished_shards():
        return [files.file(shard, "idx") for shard in files.shards]
    return indexes


def all_stale_shards(wildcards):
    """The shards to convert, of all phases."""
    return [file for phase in PHASES for file in stale_shards(phase)]


def converted_since(wildcards):
    """The shards that a manifest does not describe yet: to be converted, or newer than it."""
    phase = int(wildcards.phase)
    manifest = Path(MANIFEST.format(phase=phase))
    newer = (
        phase_files(phase).newer_shards(manifest.stat().st_mtime_ns)
        if manifest.exists()
        else []
    )
    return sorted({*stale_shards(phase), *newer})


def index_recipe(wildcards):
    """What the order depends on besides the shards, as phase_index.py's arguments."""
    data, phase = (
        PARAMETERS["data"],
        PARAMETERS["data"]["phases"][int(wildcards.phase) - 1],
    )
    return (
        f"--order {phase['order']} --seed {data['seed']}"
        f" --sequence-length {PARAMETERS['hparams']['sequence_length']}"
        f" --validation-fraction {data['validation_fraction']}"
    )


if RECIPE["source"] == "python_library":

    rule smoke_corpus:
        """Writes one Parquet file of real text that comes with Python."""
        output:
            f"{PARQUET}/phase{{phase}}/part-{{number}}.parquet",
        log:
            f"{ARTIFACTS}/logs/smoke_corpus/phase{{phase}}_{{number}}.log",
        conda:
            "../envs/python.yaml"
        params:
            shards=RECIPE["source_shards"],
        shell:
            "exec python -m scripts.data.make_smoke_corpus --phase {wildcards.phase}"
            " --shard {wildcards.number} --shards-per-phase {params.shards}"
            " --output {output:q} > {log:q} 2>&1"


if RECIPE["tokenizer"] == "train":

    rule smoke_tokenizer:
        """Trains a small tokenizer of Qwen2's kind on the corpus."""
        input:
            [
                phase_files(phase).raw(shard)
                for phase in PHASES
                for shard in phase_files(phase).shards
            ],
        output:
            TOKENIZER_FILES,
        log:
            f"{ARTIFACTS}/logs/smoke_tokenizer.log",
        conda:
            "../envs/python.yaml"
        params:
            vocabulary=PARAMETERS["model"]["padded_vocab_size"],
            folder=TOKENIZER,
        shell:
            "exec python -m scripts.data.train_smoke_tokenizer --input {input:q}"
            " --vocab-size {params.vocabulary} --output-dir {params.folder:q} > {log:q} 2>&1"


rule tokenizer:
    """Checks that the tokenizer fits the model, and records what it is."""
    input:
        files=TOKENIZER_FILES,
        model=f"{ROOT}/scripts/params/{config['model']}/model.yaml",
    output:
        TOKENIZER_FACTS,
    log:
        f"{ARTIFACTS}/logs/tokenizer.log",
    conda:
        "../envs/python.yaml"
    params:
        end_of_document=RECIPE["end_of_document"],
    shell:
        "python -m scripts.data.tokenizer check --tokenizer {TOKENIZER:q}"
        " --model {input.model:q} --end-of-document {params.end_of_document:q}"
        " --output {output:q} 2>&1 | tee {log:q}"


rule convert:
    """Converts one Parquet file to one shard in Megatron's format."""
    input:
        parquet=f"{PARQUET}/phase{{phase}}/{{shard}}.parquet",
        tokenizer=TOKENIZER_FACTS,  # not ancient: below a job that runs it would hide staleness
    output:
        bin=f"{SHARD}.bin",
        idx=ensure(f"{SHARD}.idx", non_empty=True),
        sidecar=f"{SHARD}.json",
    log:
        f"{ARTIFACTS}/logs/convert/phase{{phase}}/{{shard}}.log",
    conda:
        "../envs/python.yaml"
    threads: config["runtime"]["convert_threads"]
    shell:
        "exec python -m scripts.data.convert_phase_to_megatron --input {input.parquet:q}"
        " --output-dir {CONVERTED:q}/megatron_phase{wildcards.phase}"
        " --output-prefix-prefix phase{wildcards.phase}"
        " {CONVERSION} --workers-per-shard {threads} > {log:q} 2>&1"


rule phase_manifest:
    """Lists the shards of a phase with their sizes and digests, after checking that each is whole."""
    input:
        converted_since,
    output:
        MANIFEST,
    log:
        f"{ARTIFACTS}/logs/manifest/phase{{phase}}.log",
    conda:
        "../envs/python.yaml"
    params:
        shards=lambda wildcards: digest(phase_files(wildcards.phase).shards),
    shell:
        "exec python -m scripts.data.phase_manifest --phase {wildcards.phase}"
        " --parquet-dir {PARQUET:q} --converted-dir {CONVERTED:q}"
        " --text-key {RECIPE[text_key]:q}"
        " --output {output:q} > {log:q} 2>&1"


rule phase_index:
    """Fixes the order in which a phase's documents are trained on."""
    input:
        MANIFEST,
    output:
        INDEX,
    log:
        f"{ARTIFACTS}/logs/index/phase{{phase}}.log",
    conda:
        "../envs/python.yaml"
    params:
        recipe=index_recipe,
    shell:
        "exec python -m scripts.data.phase_index --manifest {input:q} {params.recipe}"
        " --output {output:q} > {log:q} 2>&1"


rule converted_all:
    input:
        all_stale_shards,
    localrule: True
    message:
        "All shards of all phases are converted."


for _phase in PHASES:

    rule:
        name:
            f"converted_phase{_phase}"
        input:
            partial(lambda phase, wildcards: stale_shards(phase), _phase),
        localrule: True
        message:
            "All shards of the phase are converted."

    rule:
        name:
            f"index_phase{_phase}"
        input:
            INDEX.format(phase=_phase),
        localrule: True
        message:
            "The order of the phase is fixed."
