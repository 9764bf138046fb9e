# What jobs ask a cluster's scheduler for; without a scheduler all of this does nothing.
#
# Settings: cluster.*, runtime.{gpus,nodes}. Profile: profiles/slurm. docs/cluster.md explains it.
from snakemake.resources import Resources

CLUSTER = config["cluster"]
NODES = config["runtime"]["nodes"]

# Inherited by every job, on whichever node.
os.environ.update(CLUSTER["environment"])

# Starts a command once on each node of a Slurm job, and as it is elsewhere. A step of its own gets
# Slurm's signals directly; Snakemake, which runs the shell, would keep them to itself. The step uses
# all that the job has on a node. An image is entered inside of it, since there is no srun in one.
ON_EACH_NODE = (
    "${SLURM_JOB_ID:+srun --overlap --cpu-bind=none --unbuffered"
    f" --nodes={NODES} --ntasks={NODES} --ntasks-per-node=1}}"
    + (
        f" apptainer exec --nv {shlex.quote(CLUSTER['image'])}"
        if CLUSTER["image"]
        else ""
    )
)


def placement(settings):
    """Where jobs run, as the Slurm plugin's resources; empty settings are the scheduler's matter."""
    named = {
        "slurm_account": CLUSTER["account"],
        "slurm_partition": settings["partition"],
        "qos": settings["qos"],
        "constraint": settings["constraint"],
        "runtime": settings["minutes"],
        "mem_mb": settings["memory_mb"],
    }
    return {name: value for name, value in named.items() if value}


def train_resources():
    """What training asks for: one job of all nodes, in which each node runs one launcher."""
    settings, gpus = CLUSTER["train"], config["runtime"]["gpus"]
    save_seconds = round(60 * settings["save_minutes"])
    options = [f"--signal=TERM@{save_seconds}", "--ntasks-per-node=1"]
    if gpus:
        options.append(f"--gpus-per-node={gpus}")
    several = {"mpi": "srun", "tasks": NODES, "tasks_per_gpu": 0} if NODES > 1 else {}
    return {
        **placement(settings),
        **several,
        "gpu": gpus * NODES,
        "nodes": NODES,
        "on_each_node": ON_EACH_NODE,
        "cpus_per_task": settings["cpus"],
        "slurm_extra": " ".join(options),
    }


# The default resources of every rule, which a rule and the command line can override.
workflow.resource_settings._parsed_default_resources.update(
    Resources.from_mapping(placement(CLUSTER))
)

# Used by all other rules under `--software-deployment-method apptainer`.
if CLUSTER["image"]:

    container: CLUSTER["image"]
