"""Files that commands write: one rule for all, and looked at before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dblp.cli import memory
from dblp.cli.main import run
from dblp.cli.output import PICTURE_FORMS, check_folder, check_outputs, picture_form, write_file
from dblp.errors import LocalError


def test_a_look_leaves_nothing_behind_and_changes_nothing(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("{}")
    check_outputs(
        {"--json": there, "--report": tmp_path / "new" / "r.html"}, {"--picture": tmp_path / "p.PNG"}
    )
    assert there.read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_one_folder_is_made_and_no_more(tmp_path):
    write_file("--json", tmp_path / "a" / "x.json", b"1")
    assert (tmp_path / "a" / "x.json").read_bytes() == b"1"
    for work in (lambda path: check_outputs({"--json": path}), lambda path: write_file("--json", path, b"1")):
        with pytest.raises(
            LocalError, match=f"there is no folder {tmp_path}/b. Remedy: mkdir -p {tmp_path}/b/c"
        ):
            work(tmp_path / "b" / "c" / "x.json")
    assert not (tmp_path / "b").exists()


def test_nothing_is_made_in_the_root_folder():
    with pytest.raises(LocalError, match="there is no folder /dblp-nowhere"):
        check_outputs({"--json": Path("/dblp-nowhere/x.json")})
    assert not Path("/dblp-nowhere").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is a folder; name a file"),
        ("file/x.png", "file is no folder"),
        ("file/a/x.png", "is no folder"),
        ("x.foo", r"a picture cannot end in .foo; use one of .png, .svg"),
        ("x", "a picture's name needs an ending"),
        ("folder.png", "is a folder; name a file"),
    ],
)
def test_pictures_that_cannot_be_written(tmp_path, name, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(LocalError, match=says) as caught:
        check_outputs({}, {"--picture": tmp_path / name})
    assert str(caught.value).startswith(f"--picture {tmp_path / name}: ")


def test_two_options_have_two_files(tmp_path):
    with pytest.raises(LocalError, match=r"--report .*: is the file of --json too"):
        check_outputs({"--json": tmp_path / "x", "--report": tmp_path / "x"})


def test_a_folder_of_results(tmp_path):
    (tmp_path / "file").write_text("")
    check_folder("--resume", None)
    check_folder("--resume", tmp_path)
    check_folder("--resume", tmp_path / "new")
    for name, says in (("file", "is a file; name a folder"), ("a/b", "there is no folder")):
        with pytest.raises(LocalError, match=says):
            check_folder("--resume", tmp_path / name)


def test_a_pipe_is_written_without_a_look(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a reader
    check_outputs({"--json": tmp_path / "pipe"})


def test_matplotlib_writes_all_forms_that_are_named():
    figure = pytest.importorskip("matplotlib.figure")
    assert set(PICTURE_FORMS) <= set(figure.Figure().canvas.get_supported_filetypes())
    assert picture_form("--picture", Path("a.SVG")) == "svg"


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["bench", "allreduce"],
        ["bench", "burst"],
        ["bench", "compression", "--steps", "0"],
        ["doctor"],
        ["pcap", "x.pcap"],
        ["sim", "run", "scale"],
        ["lab", "run", "clean"],
        ["lab", "list"],
        ["lab", "check"],
        ["lab", "compare", "a.json", "b.json"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_looks_first(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([*command, "--json", "a/b/x.json"]) == 2
    said = capsys.readouterr()
    assert f"--json a/b/x.json: cannot be written: there is no folder {tmp_path}/a" in said.err
    assert not said.out, "refused before anything is shown"


@pytest.mark.parametrize(
    "command",
    [["pcap", "x.pcap"], ["train"], ["sim", "run", "scale"], ["lab", "run", "clean"], ["lab", "report", "x.json"]],
    ids=lambda words: words[0],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--picture", "--png", "--figure", "--plot"])
def test_every_picture_has_a_form_and_is_no_folder(command, option, capsys, tmp_path):
    """Under the one name, which errors have and help shows, and under those that options had once."""
    assert run([*command, option, str(tmp_path / "x.foo")]) == 2
    assert (
        f"--picture {tmp_path}/x.foo: a picture cannot end in .foo; use one of .png"
        in capsys.readouterr().err
    )
    assert run([*command, f"{option}={tmp_path}"]) == 2
    assert f"--picture {tmp_path}: is a folder; name a file" in capsys.readouterr().err
    assert run([*command, "--help"]) == 0
    assert (option in capsys.readouterr().out) is (option == "--picture")


@pytest.mark.parametrize(
    "command",
    [["sim", "run", "scale"], ["lab", "run", "clean"], ["lab", "report", "x.json"]],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("option", ["--report", "--html"])
def test_every_report_has_one_name(command, option, capsys, tmp_path):
    assert run([*command, option, str(tmp_path)]) == 2
    assert f"--report {tmp_path}: is a folder; name a file" in capsys.readouterr().err
    assert run([*command, option, str(tmp_path / "r.PNG")]) == 2
    assert f"--report {tmp_path}/r.PNG: a report is one HTML file" in capsys.readouterr().err
    assert run([*command, "--help"]) == 0
    assert (option in capsys.readouterr().out) is (option == "--report")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["bench", "allreduce", "--sizes", "99999G"], "--sizes, --ranks: 2 ranks with 97.66 TiB would hold"),
        (["bench", "burst", "--size", "99999G"], "--size, --jobs"),
        (["bench", "compression", "--melem", "99999999", "--steps", "0"], "--melem, --ranks"),
        (["lab", "run", "clean", "--sizes", "99999G"], "sizes: 4 ranks with 4 arms and 97.66 TiB would hold"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_figures(command, words, capsys, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  4194304 kB\nMemAvailable:    2097152 kB\n")
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    assert run(command) == 2
    error = capsys.readouterr().err
    assert words in error and "GiB at least, and this host has 2.0 GiB available: take" in error


def test_where_the_kernel_tells_no_memory_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "absent")
    assert memory.available_bytes() is None
    memory.require_memory(2**60, "it", "less")
