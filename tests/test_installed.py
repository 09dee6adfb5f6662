"""The pip line of a remedy gets the dblp that runs, not what an index has under its name."""

import json
from importlib import metadata

import pytest

from dblp import installed


class Distribution:
    def __init__(self, origin: str | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._origin


@pytest.fixture
def came_from(monkeypatch):
    def set_origin(origin: object) -> None:
        text = origin if origin is None or isinstance(origin, str) else json.dumps(origin)
        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(text))
        installed._origin.cache_clear()

    yield set_origin
    installed._origin.cache_clear()


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({"url": "file:///home/a/dblp", "dir_info": {"editable": True}}, "-e '/home/a/dblp[lab]'"),
        ({"url": "file:///home/a%20b/dblp", "dir_info": {}}, "'/home/a b/dblp[lab]'"),
        ({"url": "file:///tmp/dblp-0.1.0-py3-none-any.whl"}, "'/tmp/dblp-0.1.0-py3-none-any.whl[lab]'"),
        (
            {"url": "https://host/dblp.git", "vcs_info": {"vcs": "git"}},
            "'dblp[lab] @ git+https://host/dblp.git'",
        ),
        ({"url": "https://host/dblp.tar.gz", "archive_info": {}}, "'dblp[lab] @ https://host/dblp.tar.gz'"),
    ],
)
def test_the_line_names_where_it_came_from(came_from, origin, line):
    came_from(origin)
    assert installed.pip_line("lab") == f"python -m pip install {line}"


@pytest.mark.parametrize("origin", [None, "", "{not json", "[]"])
def test_of_unknown_origin_says_so(came_from, origin):
    came_from(origin)
    assert (
        installed.pip_line("lab")
        == "python -m pip install 'dblp[lab]' (from where dblp itself was installed)"
    )


def test_without_metadata_it_still_answers(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    installed._origin.cache_clear()
    assert "'dblp[lab]'" in installed.pip_line("lab")
    installed._origin.cache_clear()


def test_extras_are_named_once(came_from):
    came_from({"url": "file:///d", "dir_info": {"editable": True}})
    assert installed.pip_line("ray", "sim", "ray") == "python -m pip install -e '/d[ray,sim]'"
