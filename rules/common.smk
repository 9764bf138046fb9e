# Settings, paths and input functions that the other rule files share.
import os
import sys
from functools import cache, partial
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.enums import RerunTrigger

ROOT = Path(workflow.basedir)
MEGATRON = ROOT / "Megatron-LM"

# `python` in a rule is the one that Snakemake runs in, it finds `scripts`, and Megatron-LM where the
# submodule is checked out; else Megatron comes from the wheel.
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ["PATH"]]
)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT)]
    + [str(MEGATRON)] * (MEGATRON / "megatron").is_dir()
    + [path for path in [os.environ.get("PYTHONPATH")] if path]
)
sys.path.insert(0, str(ROOT))

from scripts.common.files import canonical_json, digest, read_json
from scripts.common.machine import MachineError, check_megatron, check_python
from scripts.common.settings import SettingsError, check, load_parameters, phase_recipe

try:
    check_python()
    check_megatron(MEGATRON)
    config.update(check(config, ROOT / "rules/config.schema.yaml", "config.yaml"))
    PARAMETERS = load_parameters(config["model"])
    if config["phases"] > len(PARAMETERS["data"]["phases"]):
        raise SettingsError(
            f"phases: {config['phases']} phases, but scripts/params/{config['model']}/data.yaml "
            f"describes {len(PARAMETERS['data']['phases'])}"
        )
except (MachineError, SettingsError) as error:
    raise WorkflowError(str(error))

PHASES = range(1, config["phases"] + 1)
PARQUET, TOKENIZER, CONVERTED, ARTIFACTS = (
    config["paths"][name] for name in ("parquet", "tokenizer", "converted", "artifacts")
)
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


wildcard_constraints:
    phase=r"\d+",
    shard=r"[^/]+",


@cache
def say(line):
    """Says what is pending once, in people's words; the processes of single jobs are silent."""
    if line and workflow.is_main_process:
        print(line, file=sys.stderr)


def tune_scheduler():
    """Takes the fast scheduler where no profile did: the default falls to one job a second at 20,000."""
    scheduler = workflow.scheduler
    if not scheduler.subsample:
        scheduler.subsample = 200
        scheduler._job_selector = scheduler.job_selector_greedy


@cache
def ignore_changed_input_lists():
    """Drops Snakemake's `input` trigger: finished shards are left out of input lists on purpose."""
    settings = workflow.dag_settings
    settings.rerun_triggers = frozenset(settings.rerun_triggers) - {RerunTrigger.INPUT}


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
