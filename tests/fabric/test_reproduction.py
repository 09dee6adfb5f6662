"""docs/reproduction.md says what the experiments' TOMLs say, whichever dblp Python would import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dblp.sim.fabric.experiment import experiment_names, load_experiment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reproduction.md"


@pytest.mark.parametrize("name", experiment_names())
def test_the_page_has_the_titles_and_reasons_of_the_tomls(name):
    section = PAGE.read_text().partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    experiment = load_experiment(name)
    for told in (experiment.title, experiment.paper, experiment.why):
        assert told in section


def test_the_page_is_made_of_the_checkout_that_its_maker_is_in(tmp_path):
    """Another dblp comes first on Python's path; and the date is the one that is given."""
    docs = tmp_path / "here" / "docs"
    docs.mkdir(parents=True)
    (docs / "generate_reproduction.py").write_text((ROOT / "docs" / "generate_reproduction.py").read_text())
    (docs.parent / "dblp").symlink_to(ROOT / "dblp")
    other = tmp_path / "other" / "dblp"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('the other one')")
    (tmp_path / "scale.json").write_text(json.dumps({"host": {"cores": 3, "cpu": "a"}, "records": []}))
    command = [sys.executable, str(docs / "generate_reproduction.py"), str(tmp_path), "1 May 2031"]
    environment = {**os.environ, "PYTHONPATH": str(other.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "not of the arms and points of scale" in done.stderr
    (tmp_path / "scale.json").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1 May 2031" in (docs / "reproduction.md").read_text()
