"""docs/policies.md: the presets' part is what its script writes, and its mechanisms stand where it says."""

import importlib.util
import re
from pathlib import Path

from dblp.collectives.presets import preset, presets

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "generate_policies.py"


def load_script():
    spec = importlib.util.spec_from_file_location("generate_policies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    script = load_script()
    assert script.PAGE.read_text() == script.page(), "run: python docs/generate_policies.py"


def test_every_preset_has_a_row_and_all_its_differences():
    part = load_script().part()
    for name in presets():
        (row,) = [line for line in part.splitlines() if line.startswith(f"| `{name}` ")]
        assert len(row.strip("|").split(" | ")) == 8
        for difference in preset(name).differences:
            assert f"- {difference}\n" in part


def test_the_code_that_the_page_names_is_there():
    named = re.findall(r"`((?:collectives|transport|sim)/[\w/]+(?:\.py)?)`", load_script().PAGE.read_text())
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path
