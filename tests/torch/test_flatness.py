"""What ``tests.benchmarks.flatness`` calls flat; a short run of it is in ``test_leaving``."""

import sys

import pytest

from tests.benchmarks import flatness
from tests.benchmarks.flatness import LOOKS, Course, Look, faults


def course(who="rank 0", kind="groups", each=0.0, done=10_000, descriptors=0, threads=0):
    """A process that grows evenly; ``descriptors`` and ``threads``: what it gains in all."""
    looks = [
        Look(
            done * (index + 1) // LOOKS,
            int(200e6 + each * done * (index + 1) / LOOKS),
            20 + descriptors * index // (LOOKS - 1),
            5 + threads * index // (LOOKS - 1),
        )
        for index in range(LOOKS)
    ]
    return Course(kind, who, looks, 60.0)


def test_what_is_flat_has_no_faults():
    assert faults([course(each=200), course("rank 1", each=-900), course("store", each=1700)]) == []
    assert faults([course(kind="rounds", each=10, done=20_000, descriptors=2)]) == []
    assert faults([course(each=20_000, done=300)]) == [], "the allocator's noise over so few"


@pytest.mark.parametrize(
    ("grows", "said"),
    [
        ({"each": 6000.0}, "6000 bytes each, more than"),
        ({"kind": "rounds", "each": 800.0, "done": 20_000}, "800 bytes each"),
        ({"descriptors": 10_000}, "descriptors"),
        ({"threads": 30}, "threads"),
        ({"each": 100_000.0, "done": 300}, "bytes each"),
    ],
)
def test_what_grows_is_said(grows, said):
    (text,) = faults([course("rank 1"), course(**grows)] if "done" not in grows else [course(**grows)])[:1]
    assert said in text and "rank 0" in text


def test_the_bytes_of_a_store_are_of_a_group_not_of_a_second():
    assert faults([course(), course("store", each=1e6, done=20)]) == []  # 20 MB in 20 s, of 10,000 groups
    (text,) = faults([course(), course("store", each=5e6, done=20)])
    assert "store: 10000 bytes each" in text


@pytest.mark.parametrize(("each", "code"), [(0.0, 0), (50_000.0, 1)])
def test_the_exit_code_says_it(monkeypatch, capsys, each, code):
    monkeypatch.setattr(flatness, "measure", lambda kind, times: [course(kind=kind, done=times, each=each)])
    monkeypatch.setattr(sys, "argv", ["flatness", "--rounds", "0"])
    with pytest.raises(SystemExit) as ended:
        flatness.main()
    assert int(ended.value.code or 0) == code
    assert ("not flat: 10,000 groups, rank 0: 50000 bytes each" in capsys.readouterr().out) == bool(code)
