"""The oldest torch that is tested is the one that is promised."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_makefile_takes_the_release_that_setup_cfg_promises():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    promised = re.search(r"^torch>=([\d.]+)$", setup["options.extras_require"]["torch"], re.MULTILINE)
    tested = re.search(r"^OLDEST_TORCH := ([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert promised is not None and tested is not None
    assert tested[1] == f"{promised[1]}.0"
