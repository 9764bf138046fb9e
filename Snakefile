# Pre-trains Kaiyuan-2B: Parquet -> .bin/.idx shards -> five phases -> verified model -> report.
# Targets: converted_all, converted_phase1 …, train_phase1 …, train_all, export, report; all by default.
# README.md says how to use it, docs/ what each stage does; config.yaml holds the settings.
from snakemake.utils import min_version

min_version("9.27")


configfile: f"{workflow.basedir}/config.yaml"


report: "docs/report/workflow.rst"


include: "rules/common.smk"
include: "rules/cluster.smk"
include: "rules/data.smk"
include: "rules/hub.smk"
include: "rules/train.smk"
include: "rules/release.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/profiling.smk"


rule all:
    default_target: True
    input:
        all_stale_shards,
        rules.train_all.input,
        rules.export.input,
        rules.report.input,
    localrule: True


onstart:
    look_for_garbage()
    tune_scheduler()
    stop_training_with_snakemake()
    tell("start")


onsuccess:
    drop_converted_parquet()
    tell("success")


onerror:
    tell("failure", log)
