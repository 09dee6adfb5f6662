"""Writes docs/configuration.md from the dataclass TransportConfig: ``python docs/generate_configuration.py``.

A test compares the file with ``page()``, so the table cannot fall behind the code.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import fields
from pathlib import Path

from dblp.transport.config import TransportConfig
from dblp.units import MIB, format_bytes, format_seconds

PAGE = Path(__file__).with_name("configuration.md")

_HEAD = """\
# Configuration

Each setting is a field of `dblp.TransportConfig`, a frozen dataclass, and an environment variable that `torchrun` users set:

    DBLP_TIMEOUT_S=60 DBLP_DATAGRAM_BYTES=8952 torchrun --nproc-per-node 4 train.py
    dblp.init_process_group(config=dblp.TransportConfig(timeout_s=60, datagram_bytes=8952))

A value in code wins over the variable. An unusable value is a `ConfigError` that names it. Variables take units: times
`ns us ms s min`, sizes `B KB MB GB` (powers of 1024), rates `bit kbit mbit gbit` (powers of 1000); a bare number is in
seconds, bytes or bits per second. A `DBLP_*` variable that nothing reads is named in a warning, with the one that was probably
meant.

This table is made from the code by `python docs/generate_configuration.py`.

| Field | Variable | Default | Meaning |
|---|---|---|---|
"""
_TAIL = """
Not settings of the transport, but read as well:

| Variable | Meaning |
|---|---|
| `DBLP_JOB` | Name of the job for `dblp.init_process_group`: tells jobs apart that meet on one port by mistake. |
| `DBLP_NETEM_RUNNER` | For tests where the kernel lacks netem: a command that runs its one argument, a shell text, where it is. |
| `MASTER_ADDR`, `MASTER_PORT`, `RANK`, `WORLD_SIZE` | As in torch.distributed: where the ranks meet, and which one this is. |

The loss policy is no setting: it is given in code with the call that may lose (`dblp.attach(model,
policy=dblp.Bounded(0.1))`), so that no variable can make an exact collective lossy.
"""


def page() -> str:
    """The whole page."""
    meanings = _field_docs()
    rows = [
        f"| `{spec.name}` | `DBLP_{spec.name.upper()}` | {_default(spec.name, spec.default)} | {meanings[spec.name]} |"
        for spec in fields(TransportConfig)
    ]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


def _field_docs() -> dict[str, str]:
    """The string under each field of the class, as one line."""
    tree = ast.parse(inspect.getsource(TransportConfig))
    body = tree.body[0].body  # type: ignore[attr-defined]  # the only statement is the class
    docs: dict[str, str] = {}
    for field, following in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(ast.literal_eval(following.value)).split()).replace(
                "``", "`"
            )
    return docs


def _default(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int) and value >= MIB:
        return format_bytes(value)
    if name.endswith("_s") and isinstance(value, float):
        return f"{value:g} s" if value >= 1 else format_seconds(value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value}" if value != "" else "empty"


if __name__ == "__main__":
    PAGE.write_text(page())
