"""The settings of a run: config.yaml and scripts/params/<model>/{model,hparams,data}.yaml, checked.

Every file has a JSON schema beside it. A setting that is unknown, of the wrong type or out of range
is refused by name, together with what is allowed.
"""

import difflib
import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = ROOT / "scripts" / "params"
PARAMETER_FILES = ("model", "hparams", "data")


class SettingsError(ValueError):
    """A setting that cannot be used, with its name and what is allowed."""


def read_yaml(path: Path) -> Any:
    """Reads a YAML file; an error names file and line."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error


def load_settings(*sources: str) -> dict[str, Any]:
    """Returns the settings of config.yaml, checked.

    A source is a YAML file or JSON itself; what a later one says wins.
    """
    settings: dict[str, Any] = {}
    for source in sources:
        part = json.loads(source) if source.lstrip().startswith("{") else read_yaml(Path(source))
        settings = merge(settings, part or {})
    return check(settings, ROOT / "rules" / "config.schema.yaml", "config.yaml")


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with changes put in, block by block."""
    merged = dict(settings)
    for key, value in changes.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = merge(before, value) if both else value
    return merged


def check(settings: dict[str, Any], schema_file: Path, name: str) -> dict[str, Any]:
    """Returns the settings with strings of the command line turned into the schema's types.

    Raises SettingsError with a line for each wrong setting; `name` is what the user calls the file.
    """
    schema = read_yaml(schema_file)
    settings = coerce(settings, schema)
    errors = sorted(Draft202012Validator(schema).iter_errors(settings), key=lambda e: list(e.path))
    if errors:
        lines = "\n".join(f"  {explain(error)}" for error in errors)
        raise SettingsError(f"{name} has settings that cannot be used:\n{lines}")
    return settings


def coerce(value: Any, schema: dict[str, Any]) -> Any:
    """Parses strings where the schema wants no string: `--config` hands over every leaf as one."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return {key: coerce(item, known.get(key, {})) for key, item in value.items()}
    if isinstance(value, list):
        return [coerce(item, schema.get("items", {})) for item in value]
    if isinstance(value, str) and schema.get("type", "string") != "string":
        return yaml.safe_load(value)
    return value


def explain(error: ValidationError) -> str:
    """Says which setting is wrong and what is allowed, in one line."""
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        unknown = [key for key in error.instance if key not in known]
        return "; ".join(
            unknown_setting(f"{where}.{key}".strip("."), key, known) for key in unknown
        )
    if error.validator == "enum":
        allowed = ", ".join(map(str, error.validator_value))
        return f"{where}: {error.instance!r} is not one of {allowed}"
    return f"{where or 'file'}: {error.message}"


def unknown_setting(where: str, key: str, known: list[str]) -> str:
    """Names an unknown setting and the known one that looks most like it."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"{where}: unknown setting; {hint}"


def load_parameters(model: str) -> dict[str, dict[str, Any]]:
    """Reads and checks scripts/params/<model>: {"model": …, "hparams": …, "data": …}."""
    folder = PARAMETERS / model
    if not folder.is_dir():
        models = ", ".join(sorted(path.name for path in PARAMETERS.iterdir() if path.is_dir()))
        raise SettingsError(f"model: there is no scripts/params/{model}; there are: {models}")
    return {
        kind: check(
            read_yaml(folder / f"{kind}.yaml"),
            PARAMETERS / f"{kind}.schema.yaml",
            f"scripts/params/{model}/{kind}.yaml",
        )
        for kind in PARAMETER_FILES
    }


def phase_recipe(parameters: dict[str, dict[str, Any]], phase: int) -> dict[str, Any]:
    """Returns what a phase's result depends on: all parameters but those of later phases."""
    hparams, data = parameters["hparams"], parameters["data"]
    rates = hparams["learning_rate"]
    return {
        "model": parameters["model"],
        "hparams": hparams | {"learning_rate": rates | {"phases": rates["phases"][:phase]}},
        "data": data | {"phases": data["phases"][:phase]},
    }
