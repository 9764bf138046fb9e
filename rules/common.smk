# Settings, names of files, and input functions: all that the rules of the other files refer to.
#
# Lists of inputs are functions that leave out what is finished: 50,000 shards that are converted cost
# a dry run two seconds and not forty. What that takes of Snakemake is semi-private (the settings'
# rerun_triggers, the DAG's forcefiles, the scheduler's subsample): tests/workflow watches over it and
# pyproject.toml pins the versions.
import gc
import os
import shlex
import signal
import sys
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import batched
from pathlib import Path

import psutil
from snakemake.exceptions import WorkflowError
from snakemake.settings.enums import RerunTrigger

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT))

from scripts.common.environment import use_checkout
from scripts.common.files import canonical_json, digest, read_json
from scripts.common.machine import MachineError, check_megatron, check_python
from scripts.common.settings import SettingsError, check, load_parameters, phase_recipe
from scripts.data.shards import configured_phase, configured_recipe
from scripts.profiling.sweep import load_profiling, points
from scripts.report.hooks import message
from scripts.report.notify import notify
from scripts.report.pending import conversion_in_words, training_in_words
from scripts.train.checkpoints import parameters
from scripts.train.run import Run

use_checkout(ROOT)

# Jobs live to the end: looking for garbage among 50,000 of them would be a twentieth of the planning.
gc.disable()

try:
    check_python()
    check_megatron(ROOT / "Megatron-LM")
    config.update(check(config, ROOT / "rules/config.schema.yaml", "config.yaml"))
    PARAMETERS = load_parameters(config["model"])
    PHASES = range(1, config["phases"] + 1)
    if config["phases"] > len(PARAMETERS["data"]["phases"]):
        raise SettingsError(
            f"phases: {config['phases']} phases, but scripts/params/{config['model']}/data.yaml "
            f"describes {len(PARAMETERS['data']['phases'])}"
        )
    if beyond := set(config["runtime"]["sorted_phases"]) - set(PHASES):
        raise SettingsError(
            f"runtime.sorted_phases: the run has phases 1 to {config['phases']} and no "
            f"{', '.join(map(str, sorted(beyond)))}: leave that out, or raise the setting phases"
        )
except (MachineError, SettingsError) as error:
    raise WorkflowError(str(error))

PARQUET, TOKENIZER, CONVERTED, ARTIFACTS = (
    config["paths"][name] for name in ("parquet", "tokenizer", "converted", "artifacts")
)

# Raw files and shards.
RECIPE = config["recipe"]
TOKENIZER_FACTS = f"{CONVERTED}/tokenizer.json"
TOKENIZER_FILES = [
    f"{TOKENIZER}/{name}"
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
]
SHARD = f"{CONVERTED}/megatron_phase{{phase}}/phase{{phase}}_{{shard}}_{RECIPE['text_key']}_document"
MANIFEST = f"{CONVERTED}/megatron_phase{{phase}}.manifest.parquet"
INDEX = f"{CONVERTED}/megatron_phase{{phase}}.index.json"
SORTED = f"{CONVERTED}/sorted"
SORTED_INDEX = f"{SORTED}/megatron_phase{{phase}}.index.json"
CONVERSION = shlex.join(  # put together once, not by each of 50,000 jobs
    [
        *("--output-dir", str(Path(SHARD).parent)),
        *("--output-prefix-prefix", "phase{phase}"),
        *("--tokenizer-model", TOKENIZER),
        *("--text-key", RECIPE["text_key"]),
        *("--end-of-document", RECIPE["end_of_document"]),
        *("--special-tokens-in-text", RECIPE["special_tokens_in_text"]),
        *("--invalid-utf8", RECIPE["invalid_utf8"]),
    ]
)
CHUNK = f"{ARTIFACTS}/converted_chunks/phase{{phase}}/{{first}}/{{last}}"  # names may have anything but "/"
CONVERT = (
    "exec python -m scripts.data.convert_phase_to_megatron --input {input.parquet:q}"
    " {params.settings} --tokenizer-engine {resources.tokenizer_engine}"
    " --workers-per-shard {threads} > {log:q} 2>&1"
)
INSPECTION = f"{ARTIFACTS}/inspection/phase{{phase}}"
ORDER_INSPECTION = f"{ARTIFACTS}/inspection/phase{{phase}}_order.json"
HUB = config["hub"]
FROM_HUB = RECIPE["source"] == "hub"
DROPS_PARQUET = FROM_HUB and not config["runtime"]["keep_parquet"]
REPOSITORY = (
    shlex.join(
        f"--repository {HUB['dataset']} --revision {HUB['dataset_revision']}"
        f" --folder {HUB['dataset_folder']}".split()
    )
    if FROM_HUB
    else ""
)

# The run.
RUN = Run(config["train_name"], Path(ARTIFACTS))
MARKER = f"{ARTIFACTS}/run_state/{config['train_name']}/phase{{phase}}.json"

# The released model and the report.
AVERAGE = f"{ARTIFACTS}/checkpoints/{config['train_name']}_average"
AVERAGING = PARAMETERS["hparams"]["averaging"]
RELEASED = AVERAGE if AVERAGING["checkpoints"] > 1 else MARKER.format(phase=PHASES[-1])
EXPORT = f"{ARTIFACTS}/hf/{config['train_name']}"
EXPORT_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[
    PARAMETERS["hparams"][
        "precision"
    ]  # the average of checkpoints is in fp32, whatever they are
]
VERDICT = f"{EXPORT}.verified.json"
GENERATIONS = f"{ARTIFACTS}/report/generations.json"
HELD_OUT = f"{ARTIFACTS}/report/held_out.json"
BENCHMARKS = f"{ARTIFACTS}/report/benchmarks.json"
SCORES = [HELD_OUT] + [BENCHMARKS] * bool(config["evaluate"]["tasks"])
MODEL_CARD = f"{ARTIFACTS}/report/model_card.md"
MODEL = f"{ROOT}/scripts/params/{config['model']}/model.yaml"
STEPS = f"{ARTIFACTS}/logs/{config['train_name']}.jsonl"
REPORT = f"{ARTIFACTS}/report"
FIGURES = {
    "lengths": "Data",
    "ranks": "Data",
    "loss": "Training",
    "learning_rate": "Training",
    "gradient": "Training",
    "throughput": "Training",
}
OVERVIEW = f"{REPORT}/overview.html"
SHARDS = f"{REPORT}/shards.csv"
PROFILE = f"{ARTIFACTS}/profile/{config['model']}"


wildcard_constraints:
    phase=r"\d+",
    shard=r"[^/]+",
    first=r"[^/]+",
    last=r"[^/]+",


if "downloads" not in workflow.global_resources:
    workflow.register_resource("downloads", config["runtime"]["parallel_downloads"])


@cache
def say(line):
    """Says what is pending once, in people's words; the processes of single jobs are silent."""
    if line and workflow.is_main_process:
        print(line, file=sys.stderr)


def tune_scheduler():
    """Takes the fast scheduler where no profile did: the default one slows down with many jobs."""
    scheduler = workflow.scheduler
    if not scheduler.subsample:
        scheduler.subsample = 200
        scheduler._job_selector = scheduler.job_selector_greedy


def look_for_garbage():
    """Does from here on what planning does without; what is planned is no garbage."""
    gc.freeze()
    gc.enable()


def stop_training_with_snakemake():
    """Passes SIGTERM and SIGINT that reach snakemake alone, as from systemd, on to its launchers.

    A closed terminal is like SIGTERM: Snakemake by itself would end at once and leave its lock.
    """

    def passing_on(answer):
        def handler(number, frame):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "scripts.train.launch" in process.cmdline():
                        process.send_signal(number)
            answer(number, frame)

        return handler

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, passing_on(signal.getsignal(number)))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup makes it
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))


@cache
def ignore_changed_input_lists():
    """Drops Snakemake's `input` trigger: finished shards are left out of input lists on purpose."""
    settings = workflow.dag_settings
    settings.rerun_triggers = frozenset(settings.rerun_triggers) - {RerunTrigger.INPUT}


@cache
def profile_points():
    """The settings of every point that `snakemake profile` measures, by name."""
    return points(load_profiling(config["model"]))


def all_settings(wildcards):
    """config.yaml as JSON; a function, since Snakemake takes braces in a string for wildcards."""
    return canonical_json(config)


def tell(event, logs=()):
    """Says on the terminal, and to whom config.yaml names, that the work starts, ended or failed."""
    if {job.rule.name for job in workflow.dag.jobs} <= {"plan", "status", "watch"}:
        return
    text = message(config, PARAMETERS, event, logs)
    print(text, file=sys.stderr)
    notify(config["notify"], event, text)


@cache
def phase_files(phase):
    """Where the files of a phase lie."""
    return configured_phase(config, int(phase))


def tokenizer_folder(wildcards, input):
    """The folder of the tokenizer's files, which rules have as `input.tokenizer`."""
    return Path(input.tokenizer[0]).parent


def wants_finished_shards():
    """Whether lists are to be complete: --forcerun convert, --forceall, --touch, --summary and such."""
    settings = workflow.dag_settings
    return (
        settings.forceall
        or bool({"convert", "download"} & set(settings.forcerun))
        or workflow.touch
        or workflow.executor_plugin is None  # nothing is to be executed, only told
    )


@contextmanager
def plainly():
    """Ends Snakemake with an error's message alone; to those of input functions it adds a traceback."""
    try:
        yield
    except (FileNotFoundError, ValueError, WorkflowError) as error:
        sys.exit(str(error))


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
@plainly()
def stale(phase):
    """The names of the shards to convert."""
    ignore_changed_input_lists()
    files = phase_files(phase)
    stale = files.stale_shards(configured_recipe(config))
    say(conversion_in_words(files, stale))
    remove_links_to_nothing(file for shard in stale for file in files.files(shard))
    return stale.keys()


@cache
def stale_shards(phase):
    """The shards to convert, by their .idx or as chunks; forced, since Snakemake may see no reason to."""
    files, names = phase_files(phase), stale(phase)
    if config["runtime"]["shards_per_job"] > 1:
        targets = chunks(phase, names)
    else:
        targets = [files.file(shard, "idx") for shard in names]
    if not workflow.touch:
        workflow.dag.forcefiles.update(targets)
        if names and FROM_HUB:
            torn = set(files.missing_parquet())
            workflow.dag.forcefiles.update(torn & {files.raw(shard) for shard in names})
    if wants_finished_shards():
        return [files.file(shard, "idx") for shard in files.shards]
    return targets


def chunks(phase, names):
    """The shards to convert in chunks that are one job each, named by the first and the last shard."""
    return [
        CHUNK.format(phase=phase, first=chunk[0], last=chunk[-1])
        for chunk in batched(names, config["runtime"]["shards_per_job"])
    ]


def chunk_parquet(wildcards):
    """The Parquet files of a chunk; of a job that is started again on a cluster, those that are left."""
    phase = int(wildcards.phase)
    files, names = phase_files(phase), stale(phase)
    shards = files.shards
    within = shards[shards.index(wildcards.first) : shards.index(wildcards.last) + 1]
    left = [shard for shard in within if shard in names]
    return [files.raw(shard) for shard in left or within]


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
        f" --passes {phase.get('passes', 1)}"
    )


def listed_digest(wildcards):
    """The content that the source table lists for a file; another one is downloaded again."""
    listed = phase_files(wildcards.phase).sources.get(wildcards.shard)
    return listed.sha256 if listed else ""


@plainly()
def parquet_files(wildcards):
    """The Parquet files of a phase."""
    files = phase_files(wildcards.phase)
    return [files.raw(shard) for shard in files.shards]


@plainly()
def missing_parquet(phase):
    """The Parquet files of a phase that are still to be downloaded."""
    if DROPS_PARQUET:
        raise WorkflowError(
            "runtime.keep_parquet is false: Parquet files are dropped after conversion. "
            f"`snakemake converted_phase{phase}` downloads what it needs"
        )
    missing = phase_files(phase).missing_parquet()
    workflow.dag.forcefiles.update(missing)  # a torn file is there and still missing
    return missing


def drop_converted_parquet():
    """Drops what is left of files that Snakemake was to drop when it was killed."""
    if DROPS_PARQUET:
        for phase in PHASES:
            phase_files(phase).drop_converted_parquet()


def train_recipe(wildcards):
    """What the phase's result depends on, as one string: Snakemake compares params as a set."""
    return canonical_json(phase_recipe(PARAMETERS, int(wildcards.phase)))


def training_index(phase):
    """The index that a phase is trained with: of its shards, or of those in training order."""
    index = SORTED_INDEX if phase in config["runtime"]["sorted_phases"] else INDEX
    return index.format(phase=phase)


def later_phases(wildcards):
    """The phases after this one, for the launcher's estimate of the run's end."""
    later = [
        {
            "length": PARAMETERS["data"]["phases"][phase - 1]["length"],
            "index": training_index(phase),
        }
        for phase in range(int(wildcards.phase) + 1, config["phases"] + 1)
    ]
    return canonical_json(later)


def is_trained(phase, recipe):
    """Whether the phase is complete under this recipe; then its shards no longer matter."""
    marker = Path(MARKER.format(phase=phase))
    return marker.exists() and read_json(marker)["recipe_digest"] == digest(recipe)


def train_input(wildcards):
    """The marker of the phase before, and the phase's index unless the phase is complete."""
    phase = int(wildcards.phase)
    before = [MARKER.format(phase=phase - 1)] if phase > 1 else []
    if is_trained(phase, phase_recipe(PARAMETERS, phase)):
        return before
    say(training_in_words(RUN, phase))
    return [*before, training_index(phase)]


def figures(category):
    """The figures of a category as items of the report; docs/report has their captions."""
    return [figure(name) for name in FIGURES if FIGURES[name] == category]


def figure(name):
    """One figure of the report."""
    return report(
        f"{REPORT}/{name}.svg",
        caption=f"../docs/report/{name}.rst",
        category=FIGURES[name],
        labels={"what": name.replace("_", " ")},
    )
