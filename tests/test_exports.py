"""The public names, and that importing them lazily costs nothing."""

import os
import subprocess
import sys

import pytest

import dblp

PUBLIC = """
    __version__
    init_process_group destroy_process_group is_initialized get_rank get_world_size
    all_reduce reduce_scatter reduce all_gather broadcast gather scatter all_to_all barrier send recv Handle
    flight_recorder FlightRecorder
    Group Report attach Attachment CheckpointState merge_states
    BudgetController Budgets Interval EnergyCap JointController EnergyCaps
    Phase NormChange LearningRateChange Metric Schedule Manual Hold
    Policy Bounded Exact Stop Short Fill Consistency Carry CarryBound Tags Preset preset presets TransportConfig
    DblpError LocalError ConfigError UnsupportedError ClosedError RemoteError MismatchError VersionError
    HandshakeError PeerError DeadlineError
"""


def test_public_names_are_pinned():
    assert sorted(dblp.__all__) == sorted(PUBLIC.split())


def test_every_public_name_resolves_and_is_listed():
    for name in dblp.__all__:
        assert getattr(dblp, name) is not None
    assert set(dblp.__all__) <= set(dir(dblp))


def test_unknown_names_raise_attribute_error():
    assert not hasattr(dblp, "no_such_name")


def test_import_is_light():
    code = "import sys, dblp; print(sorted({'torch', 'numpy', 'msgpack', 'uvloop'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_numpy_users_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import dblp, numpy as np\n"
        "print(dblp.Bounded(0.1).budget, dblp.init_process_group.__name__, dblp.Group.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "0.1 init_process_group Group"


def test_what_needs_torch_says_so_when_it_is_used():
    """Whoever only looks, as ``from dblp import *`` and ``help`` do, finds a name."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import inspect, dblp\n"
        "from dblp import *\n"
        "assert len(inspect.getmembers(dblp)) > 60 and hasattr(dblp, 'attach')\n"
        "print(repr(attach), dblp.CheckpointState)\n"
        "for use in (lambda: attach(1, policy=2), lambda: dblp.CheckpointState.fields, lambda: dblp.merge_states([])):\n"
        "    try: use()\n"
        "    except dblp.LocalError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    shown, *errors = done.stdout.splitlines()
    assert shown == "<dblp.attach, which needs torch> <dblp.CheckpointState, which needs torch>"
    names = ("attach", "CheckpointState", "merge_states")
    assert len(errors) == 3
    for name, error in zip(names, errors, strict=True):
        assert error.startswith(f"dblp.{name} needs torch, which is not installed: python -m pip install ")


def test_torch_knows_the_backend_without_the_entry_point():
    """As of a checkout on PYTHONPATH that nobody has installed."""
    pytest.importorskip("torch")
    code = "import torch.distributed as dist, dblp; print(dist.Backend.backend_type_map['dblp'])"
    place = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=place, check=False
    )
    assert "CUSTOM" in done.stdout, done.stderr
