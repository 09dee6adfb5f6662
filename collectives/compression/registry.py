"""Methods by name, from the one string that a person writes: ``dgc(ratio=0.001)``."""

from __future__ import annotations

from collections.abc import Mapping

from dblp.collectives.compression.accordion import Accordion
from dblp.collectives.compression.base import Method
from dblp.collectives.compression.dense import Dense
from dblp.collectives.compression.dgc import DGC
from dblp.collectives.compression.gravac import GraVAC
from dblp.collectives.compression.half import BFloat16, Float16
from dblp.collectives.compression.netsense import NetSense
from dblp.collectives.compression.powersgd import PowerSGD
from dblp.collectives.compression.quantise import Int4, Int8
from dblp.collectives.compression.randomk import RandomK
from dblp.collectives.compression.redsync import RedSync
from dblp.collectives.compression.shares import Joint
from dblp.collectives.compression.sign import Sign
from dblp.collectives.compression.threshold import Threshold
from dblp.collectives.compression.topk import TopK
from dblp.transport.spec import Parser

METHODS: Mapping[str, type[Method]] = {
    method.name: method
    for method in (
        *(Dense, TopK, RedSync, RandomK, Threshold),
        *(Float16, BFloat16, Int8, Int4, Sign),
        *(PowerSGD, DGC, Accordion, Joint, GraVAC, NetSense),
    )
}
"""All methods by name."""


def parse_compression(text: str) -> Method:
    """The method that a string such as ``"topk(ratio=0.01)"`` or ``"fp16"`` names; ``str(method)`` gives one that parses to an
    equal method. Raises ConfigError with the column of the fault, what was expected there, and a caret below it."""
    parser = Parser(text, "compression")
    known, start = ", ".join(METHODS), parser.at
    name = parser.take_word(f"the name of a method ({known})")
    if name not in METHODS:
        train = "; 'gloo:METHOD' is a form of dblp train alone, a model on gloo takes compress_ddp"
        hint = train if name.startswith("gloo") else ""
        parser.fail(start, f"{name!r} is no compression method; known are {known}{hint}")
    method = parser.take_element(start, METHODS[name], bare=True)
    if not parser.done:
        rest = text[parser.at :].lstrip()
        hint = ""
        if rest.startswith("over"):
            hint = "; 'METHOD over POLICY', with spaces, is a form of dblp train alone, attach takes policy="
        elif rest.startswith(";"):
            hint = "; lists of methods are for commands, a model has one"
        parser.fail(parser.at, f"the end after {name} was expected, found {parser.found()}{hint}")
    return method
