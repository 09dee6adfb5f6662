"""Where this dblp came from, so that remedies name a pip line that gets the same one.

On an index the name may be somebody else's: ``pip install 'dblp[lab]'`` could fetch another package. Of what pip installs from a
folder or an address it leaves the origin in ``direct_url.json`` (PEP 610).
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from importlib import metadata
from urllib.parse import unquote, urlsplit


def pip_line(*extras: str) -> str:
    """The command that adds these extras to the dblp that runs."""
    names = ",".join(dict.fromkeys(extras))
    return f"python -m pip install {_requirement(names)}"


@cache
def _origin() -> dict[str, object]:
    try:
        told = metadata.distribution("dblp").read_text("direct_url.json")
        origin = json.loads(told) if told else {}
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    return origin if isinstance(origin, dict) else {}


def _requirement(extras: str) -> str:
    """What pip is to install, quoted for a shell."""
    origin = _origin()
    url = str(origin.get("url", ""))
    if not url:
        return f"'dblp[{extras}]' (from where dblp itself was installed)"
    if urlsplit(url).scheme != "file":
        vcs = origin.get("vcs_info")
        prefix = f"{vcs['vcs']}+" if isinstance(vcs, dict) and "vcs" in vcs else ""
        return shlex.quote(f"dblp[{extras}] @ {prefix}{url}")
    path = unquote(urlsplit(url).path)
    folder = origin.get("dir_info")
    editable = isinstance(folder, dict) and folder.get("editable")
    return ("-e " if editable else "") + shlex.quote(f"{path}[{extras}]")
