"""docs/configuration.md is what the schemas and the default files say."""

import pytest

from scripts.common.settings import PARAMETER_FILES, PARAMETERS, ROOT, read_yaml
from scripts.report.configuration import PAGE, page

SCHEMAS = [
    ROOT / "rules" / "config.schema.yaml",
    *(PARAMETERS / f"{name}.schema.yaml" for name in PARAMETER_FILES),
]


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def undescribed(schema, path=""):
    for name, part in schema.get("properties", {}).items():
        if "description" not in part and "items" not in part:
            yield f"{path}{name}"
        yield from undescribed(part, f"{path}{name}.")


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)
def test_every_setting_has_a_description(file):
    assert list(undescribed(read_yaml(file))) == []
