"""docs/configuration.md is what the schemas and the default files say."""

import pytest

from scripts.common.settings import PARAMETERS, ROOT, read_yaml
from scripts.report.configuration import PAGE, page

SCHEMAS = [ROOT / "rules" / "config.schema.yaml", *PARAMETERS.glob("*.schema.yaml")]


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)
def test_every_schema_has_its_section(file):
    assert f"{file.name.split('.')[0]}.yaml\n" in PAGE.read_text(encoding="utf-8")


def undescribed(schema, path=""):
    for name, part in schema.get("properties", {}).items():
        if "description" not in part and "items" not in part:
            yield f"{path}{name}"
        yield from undescribed(part, f"{path}{name}.")


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)
def test_every_setting_has_a_description(file):
    assert list(undescribed(read_yaml(file))) == []
