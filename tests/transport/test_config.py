"""``DBLP_*`` variables: those that nothing reads are named once, with what was probably meant."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from dblp.errors import ConfigError
from dblp.transport import config
from dblp.transport.config import OTHER_VARIABLES, TransportConfig

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(config, "_warned", set())


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("DBLP_TIMEOUT", "DBLP_TIMEOUT_S"),
        ("DBLP_TIMOUT_S", "DBLP_TIMEOUT_S"),
        ("DBLP_IMPAIRMENT", "DBLP_IMPAIR"),
        ("DBLP_IFACE", "DBLP_IFNAME"),
        ("DBLP_JOBNAME", "DBLP_JOB"),
        ("DBLP_timeout_s", "DBLP_"),
    ],
)
def test_a_variable_that_nothing_reads_is_named_with_the_nearest_one(caplog, wrong, meant):
    with caplog.at_level(logging.WARNING, "dblp"):
        made = TransportConfig.from_env({wrong: "30", "DBLP_SEED": "5"})
    assert made == TransportConfig(seed=5)
    (record,) = caplog.records
    assert f"{wrong}=30 is set, but nothing reads it" in record.getMessage()
    assert f"did you mean {meant}" in record.getMessage()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"receive_buffer_bytes": 1 << 31}, "receive_buffer_bytes=2147483648: a socket's buffer has at most 1 GiB"),
        ({"send_buffer_bytes": 4 << 30}, "send_buffer_bytes=4294967296: a socket's buffer"),
        ({"rate_bps": float("nan")}, "rate_bps=nan: a finite number is needed"),
        ({"rate_bps": float("inf")}, "rate_bps=inf: a finite number is needed"),
        ({"switch_interval_s": float("nan")}, "switch_interval_s=nan: a finite number is needed"),
        ({"switch_interval_s": 1e10}, r"switch_interval_s=1e\+10: at most 1 seconds"),
        ({"seed": -1}, "seed=-1: must not be negative"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        TransportConfig(**wrong)


def test_sizes_have_the_units_of_the_page():
    made = TransportConfig.from_env(
        {"DBLP_WINDOW_BYTES": "2GB", "DBLP_EARLY_BYTES": "1GiB", "DBLP_SEND_BUFFER_BYTES": "1g"}
    )
    assert (made.window_bytes, made.early_bytes, made.send_buffer_bytes) == (2 << 30, 1 << 30, 1 << 30)
    with pytest.raises(ConfigError, match="a number is expected, alone or with one of"):
        TransportConfig.from_env({"DBLP_TIMEOUT_S": "nan"})


def test_it_is_named_once_a_process(caplog):
    for _ in range(3):
        TransportConfig.from_env({"DBLP_TIMEOUT": "30"})
    TransportConfig.from_env({"DBLP_TIMEOUT": "30", "DBLP_PATH": "2"})
    assert ["DBLP_TIMEOUT=" in caplog.messages[0], "DBLP_PATH=" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_known_variables_and_those_of_others_are_no_reason_to_speak(caplog):
    known = {
        "DBLP_JOB": "a",
        "DBLP_NETEM_RUNNER": "boot-and-run",
        "DBLP_IFNAME": "lo",
        "DBLP_IMPAIR": "",
        "DBLP_PATHS": "1",
        "DBLPX": "",
        "RANK": "0",
    }
    TransportConfig.from_env(known)
    assert caplog.messages == []


def test_every_variable_that_some_part_reads_is_known():
    """Sources name no ``DBLP_`` variable that is neither a field nor listed (constants of papers' names aside)."""
    names = set()
    for folder in ("transport", "collectives", "sim", "dblp/cli", "tests/lab"):
        for file in (ROOT / folder).rglob("*.py"):
            names |= set(re.findall(r"""["'](DBLP_[A-Z_]+)["'\]]""", file.read_text()))
    fields = {f"DBLP_{name.upper()}" for name in TransportConfig.__dataclass_fields__}
    assert names <= fields | OTHER_VARIABLES
    assert names >= OTHER_VARIABLES and len(names) > 2


@pytest.mark.parametrize("text", ["2.5", "two", "1e3"])
def test_what_is_no_whole_number_is_told_in_words(text):
    with pytest.raises(ConfigError, match=f"DBLP_PATHS='{text}': a whole number is needed"):
        TransportConfig.from_env({"DBLP_PATHS": text})
