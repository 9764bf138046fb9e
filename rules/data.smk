# From Parquet to the phases' indices: raw files, tokenizer, shards, manifests, order.
#
# Settings: recipe.*, paths.{parquet,tokenizer,converted}, scripts/params/<model>/data.yaml.
# Scripts: scripts/data. Every Parquet file becomes one shard (.bin, .idx, .json), which is a target of
# its own; lists of shards leave out what is finished (scripts/data/shards.py says what that is).
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
            folder=subpath(output[0], parent=True),
        shell:
            "exec python -m scripts.data.train_smoke_tokenizer --input {input:q}"
            " --vocab-size {params.vocabulary} --output-dir {params.folder:q} > {log:q} 2>&1"


rule tokenizer:
    """Checks that the tokenizer fits the model, and records what it is."""
    input:
        tokenizer=TOKENIZER_FILES,
        model=f"{ROOT}/scripts/params/{config['model']}/model.yaml",
    output:
        TOKENIZER_FACTS,
    log:
        f"{ARTIFACTS}/logs/tokenizer.log",
    conda:
        "../envs/python.yaml"
    params:
        folder=tokenizer_folder,
        end_of_document=RECIPE["end_of_document"],
    shell:
        "python -m scripts.data.tokenizer check --tokenizer {params.folder:q}"
        " --model {input.model:q} --end-of-document {params.end_of_document:q}"
        " --output {output:q} 2>&1 | tee {log:q}"


rule convert:
    """Converts one Parquet file to one shard in Megatron's format."""
    input:
        parquet=f"{PARQUET}/phase{{phase}}/{{shard}}.parquet",
        tokenizer=TOKENIZER_FACTS,  # not ancient: below a job that runs it would hide staleness
    output:
        bin=f"{SHARD}.bin",
        idx=ensure(f"{SHARD}.idx", non_empty=True),  # the .json is there before it
    log:
        f"{ARTIFACTS}/logs/convert/phase{{phase}}/{{shard}}.log",
    conda:
        "../envs/python.yaml"
    threads: config["runtime"]["convert_threads"]
    resources:
        tokenizer_engine=config["runtime"]["tokenizer_engine"],
        tmpdir=None,  # needs none; to find it out for each of 50,000 jobs takes seconds
    params:
        settings=CONVERSION,
    shell:
        CONVERT


rule convert_chunk:
    """Converts several Parquet files with one process; which of them are done, their files say."""
    input:
        parquet=chunk_parquet,
        tokenizer=TOKENIZER_FACTS,
    output:
        touch(CHUNK),
    log:
        f"{ARTIFACTS}/logs/convert_chunk/phase{{phase}}/{{first}}/{{last}}.log",
    conda:
        "../envs/python.yaml"
    threads: config["runtime"]["convert_threads"]
    resources:
        tokenizer_engine=config["runtime"]["tokenizer_engine"],
    params:
        settings=CONVERSION,
    shell:
        CONVERT


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
        parquet=PARQUET,
        converted=subpath(output[0], parent=True),
        text_key=RECIPE["text_key"],
    shell:
        "exec python -m scripts.data.phase_manifest --phase {wildcards.phase}"
        " --parquet-dir {params.parquet:q} --converted-dir {params.converted:q}"
        " --text-key {params.text_key:q}"
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
    threads: 2
    resources:
        # Half of it is the sort's, which spills to the disk.
        mem_mb=config["cluster"]["memory_mb"] or 16_000,
    params:
        recipe=index_recipe,
    shell:
        "exec python -m scripts.data.phase_index --manifest {input:q} {params.recipe}"
        " --memory-mb $(({resources.mem_mb} / 2)) --threads {threads}"
        " --output {output:q} > {log:q} 2>&1"


rule sorted_phase:
    """Writes a phase's shards anew in training order, for disks that are slow at jumping."""
    input:
        INDEX,
    output:
        SORTED_INDEX,
    log:
        f"{ARTIFACTS}/logs/sorted/phase{{phase}}.log",
    conda:
        "../envs/python.yaml"
    params:
        folder=subpath(output[0], parent=True),
    shell:
        "exec python -m scripts.data.sort_phase --index {input:q} --output-dir {params.folder:q}"
        " > {log:q} 2>&1"


rule inspect_order:
    """Says whether a phase's ranks are sound and how far reading in their order jumps."""
    input:
        INDEX,
    output:
        ORDER_INSPECTION,
    log:
        f"{ARTIFACTS}/logs/inspect/phase{{phase}}_order.log",
    conda:
        "../envs/python.yaml"
    shell:
        "python -m scripts.data.inspect_order --index {input:q} --output {output:q} 2>&1"
        " | tee {log:q}"


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

    rule:
        name:
            f"sorted_phase{_phase}"
        input:
            SORTED_INDEX.format(phase=_phase),
        localrule: True
        message:
            "The phase's shards lie in training order; runtime.sorted_phases makes training read them."

    rule:
        name:
            f"inspect_order_phase{_phase}"
        input:
            ORDER_INSPECTION.format(phase=_phase),
        localrule: True
        message:
            "The order of the phase is inspected."


rule inspect:
    """Says what the Parquet files of a phase hold; fails where that is a problem."""
    input:
        parquet_files,
    output:
        touch(f"{INSPECTION}.passed"),  # what it found is no output: it has to survive a problem
    log:
        f"{ARTIFACTS}/logs/inspect/phase{{phase}}.log",
    conda:
        "../envs/python.yaml"
    threads: 4
    params:
        parquet=lambda wildcards, input: Path(input[0]).parent,
        folder=lambda wildcards, output: output[0].removesuffix(".passed"),
        text_key=RECIPE["text_key"],
    shell:
        "python -m scripts.data.inspect_parquet --input-dir {params.parquet:q}"
        " --text-key {params.text_key:q} --workers {threads}"
        " --output-dir {params.folder:q} 2>&1 | tee {log:q}"


rule inspect_all:
    input:
        [f"{INSPECTION}.passed".format(phase=phase) for phase in PHASES],
    localrule: True
    message:
        "All Parquet files are inspected."


for _phase in PHASES:

    rule:
        name:
            f"inspect_phase{_phase}"
        input:
            f"{INSPECTION}.passed".format(phase=_phase),
        localrule: True
        message:
            "The phase's Parquet files are inspected."

    rule:
        name:
            f"check_phase{_phase}"
        log:
            f"{ARTIFACTS}/logs/check/phase{_phase}.log",
        localrule: True
        conda:
            "../envs/python.yaml"
        params:
            shards=phase_files(_phase).folder,
            parquet=phase_files(_phase).raw_folder,
            tokenizer=TOKENIZER,
        message:
            "Reading the phase's shards again."
        shell:
            "python -m scripts.data.check_shard --folder {params.shards:q}"
            " --tokenizer-model {params.tokenizer:q} --parquet-dir {params.parquet:q} 2>&1"
            " | tee {log:q}"
