"""What a phase's result depends on, and nothing else.

The Snakefile hands `phase_recipe` to the launcher, and runs a phase again when it changes. Settings
that only later phases use are not in it: the rates of phase 5 may be changed while phase 2 trains.
"""

from typing import Any

# Parts of hparams.yaml that leave the trained weights as they are.
WITHOUT_EFFECT = ("validation", "averaging")


def phase_recipe(parameters: dict[str, dict[str, Any]], phase: int) -> dict[str, dict[str, Any]]:
    """Returns {"model": …, "hparams": …, "data": …} as a phase sees them.

    `parameters` is what scripts.common.settings.load_parameters returns. `data` holds the settings
    of this phase (order, length) beside those that all phases share.
    """
    hparams, data = parameters["hparams"], parameters["data"]
    if phase > len(data["phases"]):
        raise ValueError(
            f"data.yaml describes {len(data['phases'])} phases, phase {phase} is not one of them"
        )
    table = hparams["learning_rate"]
    return {
        "model": parameters["model"],
        "hparams": hparams | {"learning_rate": table | {"phases": table["phases"][:phase]}},
        "data": {name: value for name, value in data.items() if name != "phases"}
        | data["phases"][phase - 1],
    }


def difference(before: Any, now: Any, name: str = "") -> list[str]:
    """Names the settings that differ between two JSON values, one line each."""
    if isinstance(before, dict) and isinstance(now, dict):
        lines = []
        for key in sorted(before.keys() | now.keys()):
            path = f"{name}.{key}" if name else key
            lines += difference(before.get(key), now.get(key), path)
        return lines
    return [] if before == now else [f"{name}: was {before}, is {now}"]
