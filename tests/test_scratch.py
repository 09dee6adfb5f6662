"""Temporary folders of runs: those of killed ones go, those of others stay."""

import os
import tempfile
from pathlib import Path

from dblp.scratch import folder_prefix, remove_lost_folders, started


def test_folders_of_killed_runs_are_removed_and_those_of_others_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = Path(tempfile.mkdtemp(prefix=folder_prefix("dblp-run")))
    reused = tmp_path / f"dblp-run-{os.getpid()}-1-x"  # another process has the id by now
    gone = tmp_path / "dblp-run-4194305-77-y"  # an id above the kernel's largest
    notes, lab = tmp_path / "dblp-run-notes", tmp_path / "dblp-run2-4194305-77-y"
    for folder in (reused, gone, notes, lab):
        folder.mkdir()
        (folder / "events-0.jsonl").write_text("x")
    assert remove_lost_folders("dblp-run") == sorted([str(reused), str(gone)])
    assert sorted(tmp_path.iterdir()) == sorted([mine, notes, lab])
    assert remove_lost_folders("dblp-run") == []


def test_a_process_has_one_start():
    assert started(os.getpid()) == started(os.getpid()) is not None
    assert started(4194305) is None
