"""docs/configuration.md is what its script writes, and says something of every field."""

import importlib.util
from dataclasses import fields
from pathlib import Path

from dblp.transport.config import TransportConfig

SCRIPT = Path(__file__).parent.parent / "docs" / "generate_configuration.py"


def load_script():
    spec = importlib.util.spec_from_file_location("generate_configuration", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    script = load_script()
    assert script.PAGE.read_text() == script.page(), "run: python docs/generate_configuration.py"


def test_every_field_has_a_row_with_its_variable_and_meaning():
    page = load_script().page()
    for spec in fields(TransportConfig):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{spec.name}` "))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == f"`DBLP_{spec.name.upper()}`"
        assert len(cells) == 4
        assert len(cells[3]) > 10
