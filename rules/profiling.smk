# How fast training is on this machine: snakemake profile --resources gpu=1
#
# Settings: scripts/params/<model>/profiling.yaml. Scripts: scripts/profiling. Every point of the sweep
# is a file; running out of memory is a result, so that the sweep goes on. The fastest point is then
# traced. Points run on one GPU, or on the CPU where runtime.gpus is 0.
rule profile_point:
    """Measures a few training steps with one combination of settings."""
    output:
        f"{PROFILE}/points/{{point}}.json",
    log:
        f"{PROFILE}/logs/{{point}}.log",
    wildcard_constraints:
        point=r"[^/]+",
    conda:
        "../envs/python.yaml"
    resources:
        gpu=min(1, config["runtime"]["gpus"]),
    params:
        model=config["model"],
        settings=lambda wildcards: canonical_json(profile_points()[wildcards.point]),
        steps=lambda wildcards: load_profiling(config["model"])["steps"],
    shell:
        "exec python -m scripts.profiling.point --model {params.model:q} --gpus {resources.gpu}"
        " --settings {params.settings:q} --steps {params.steps} --output {output:q}"
        " > {log:q} 2>&1"


rule profile_report:
    """Compares the points and recommends the settings to train with."""
    input:
        lambda wildcards: [
            f"{PROFILE}/points/{point}.json" for point in profile_points()
        ],
    output:
        table=f"{PROFILE}/sweep.md",
        figure=report(
            f"{PROFILE}/sweep.svg",
            category="Profiling",
            labels={"what": "speed of each setting"},
        ),
        recommended=f"{PROFILE}/recommended.json",
    log:
        f"{PROFILE}/logs/report.log",
    conda:
        "../envs/python.yaml"
    params:
        folder=subpath(output.table, parent=True),
    shell:
        "exec python -m scripts.profiling.report --points {input:q}"
        " --output-dir {params.folder:q} > {log:q} 2>&1"


rule profile_trace:
    """Traces one step of the recommended point and says where its milliseconds go."""
    input:
        rules.profile_report.output.recommended,
    output:
        point=f"{PROFILE}/trace/point.json",
        trace=f"{PROFILE}/trace/trace.json.gz",
        kernels=f"{PROFILE}/trace/kernels.json",
        breakdown=f"{PROFILE}/breakdown.md",
    log:
        f"{PROFILE}/logs/trace.log",
    conda:
        "../envs/python.yaml"
    resources:
        gpu=min(1, config["runtime"]["gpus"]),
    params:
        model=config["model"],
        folder=subpath(output.trace, parent=True),
    shell:
        "python -m scripts.profiling.point --model {params.model:q} --gpus {resources.gpu}"
        " --settings {input:q} --steps 6 --trace-dir {params.folder:q} --output {output.point:q}"
        " > {log:q} 2>&1 && exec python -m scripts.profiling.breakdown --kernels {output.kernels:q}"
        " --output {output.breakdown:q} >> {log:q} 2>&1"


rule profile_nsight:
    """Traces the recommended point with NVIDIA's Nsight Systems, where that is installed."""
    input:
        rules.profile_report.output.recommended,
    output:
        f"{PROFILE}/nsight.nsys-rep",
    log:
        f"{PROFILE}/logs/nsight.log",
    conda:
        "../envs/python.yaml"
    resources:
        gpu=min(1, config["runtime"]["gpus"]),
    params:
        model=config["model"],
        point=f"{PROFILE}/logs/nsight.json",
    shell:
        "exec > {log:q} 2>&1;"
        " command -v nsys || {{ echo 'nsys is not on the PATH: install Nsight Systems' >&2; exit 1; }};"
        " exec nsys profile --trace cuda,nvtx --sample none --force-overwrite true --output {output:q}"
        " python -m scripts.profiling.point --model {params.model:q} --gpus {resources.gpu}"
        " --settings {input:q} --steps 6 --output {params.point:q}"


rule profile:
    input:
        rules.profile_report.output,
        rules.profile_trace.output,
    localrule: True
    message:
        f"The fastest settings are in {PROFILE}/sweep.md, where the time goes in breakdown.md."
