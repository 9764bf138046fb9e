"""Makes docs/configuration.md: every setting with its default, what is allowed and what it means.

    python -m scripts.report.configuration        # `make docs` runs it

The text is that of the JSON schemas, the defaults are those of config.yaml and of the main model.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.common.files import replacing
from scripts.common.settings import PARAMETER_FILES, PARAMETERS, ROOT, read_yaml

MODEL = "qwen3_1p7b"
PAGE = ROOT / "docs" / "configuration.md"
KINDS = {"object": "block", "array": "list"}
HEAD = """# Configuration

Made by `make docs` from the JSON schemas; edit those.
A setting that is unknown, of the wrong type or out of range is refused by name.
`config.yaml` is what a user edits. Later files and `--config` change single settings:

```sh
snakemake -n --configfile mine.yaml
snakemake -n --config train_name=second
```
"""


def page() -> str:
    """Returns the text of the page."""
    config = read_yaml(ROOT / "config.yaml")
    sections = [HEAD, section("config.yaml", ROOT / "rules" / "config.schema.yaml", config)]
    for name in (*PARAMETER_FILES, "profiling"):
        values = read_yaml(PARAMETERS / MODEL / f"{name}.yaml")
        title = f"scripts/params/&lt;model&gt;/{name}.yaml"
        sections.append(section(title, PARAMETERS / f"{name}.schema.yaml", values))
    return "\n".join(sections)


def section(title: str, schema_file: Path, values: dict[str, Any]) -> str:
    """Returns a file's heading and table; `values` are the defaults."""
    schema = read_yaml(schema_file)
    rows = [
        f"| `{name}` | {code(default)} | {allowed(part)} | {escaped(part.get('description', ''))} |"
        for name, part, default in settings_of(schema, values)
    ]
    heading = escaped(schema.get("description", schema.get("title", "")))
    table = ["| setting | default | allowed | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"## {title}", "", heading, "", *table, ""])


def settings_of(
    schema: dict[str, Any], values: Any, prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yields name, schema and default of every block and setting; `[]` stands for list items."""
    for name, part in schema.get("properties", {}).items():
        value = values.get(name) if isinstance(values, dict) else None
        yield f"{prefix}{name}", part, value
        inner, path = part, f"{prefix}{name}"
        while "items" in inner:
            inner, path = inner["items"], f"{path}[]"
        yield from settings_of(inner, value, f"{path}.")


def code(value: Any) -> str:
    """Returns a default as code; blocks and lists have theirs in the file."""
    if value is None or isinstance(value, dict | list):
        return ""
    return f"`{escaped(json.dumps(value, ensure_ascii=False))}`"


def allowed(part: dict[str, Any]) -> str:
    """Returns what a setting may be."""
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "const" in part:
        return f"`{part['const']}`"
    if "oneOf" in part:
        return " or ".join(
            "`{" + ", ".join(option["properties"]) + ": …}`"
            if "properties" in option
            else allowed(option)
            for option in part["oneOf"]
        )
    items = part.get("items", {})
    if items and items.get("type") not in KINDS:
        return f"list of {allowed(items)}"
    kinds = part.get("type", "")
    kind = " or ".join(kinds) if isinstance(kinds, list) else KINDS.get(kinds, kinds)
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    ranges = [f"{sign} {part[key]}" for key, sign in limits.items() if key in part]
    return " ".join([kind, ", ".join(ranges)]).strip()


def escaped(text: str) -> str:
    """Returns text for a cell of a Markdown table."""
    one_line = " ".join(str(text).split())
    return one_line.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PAGE, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    with replacing(arguments.output) as partial:
        partial.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
