"""``dblp pcap``: what a capture says of rounds, messages, repairs and stops; and the dissector for Wireshark."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dblp.cli.extras import require
from dblp.cli.output import check_outputs, write_file
from dblp.errors import ConfigError
from dblp.transport import lua as wireshark

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dblp.transport.capture import Capture
    from dblp.transport.capture_summary import MessageTrace, RoundTrace


def pcap(
    file: Annotated[Path | None, typer.Argument(help="Capture, pcap or pcapng.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(help="Rows of each table; 0: all.")] = 20,
    picture: Annotated[Path | None, typer.Option(help="Draw a time-sequence picture.")] = None,
    lua: Annotated[Path | None, typer.Option(help="Write a dissector for Wireshark.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write rounds and messages as JSON.")] = None,
) -> None:
    """Take a capture apart: rounds, messages, repairs, and how each message stopped."""
    if file is None and lua is None:
        raise ConfigError("dblp pcap: name a capture to read, or --lua FILE to write the dissector to")
    if file is None and (picture or json):
        raise ConfigError("dblp pcap: --picture and --json need a capture to read")
    if limit < 0:
        raise ConfigError(f"--limit {limit}: must not be negative")
    check_outputs({"--lua": lua, "--json": json}, {"--picture": picture})
    if lua is not None:
        _write_lua(lua)
    if file is not None:
        require("scapy", *(["matplotlib"] if picture else []))
        _read(file, limit or None, picture, json)


def _write_lua(path: Path) -> None:
    write_file("--lua", path, wireshark.script().encode())
    typer.echo(f"dissector: {path}; use it with: wireshark -X lua_script:{path}")


def _read(file: Path, limit: int | None, picture: Path | None, json: Path | None) -> None:
    from rich.console import Console

    from dblp.cli.host import document, write_json
    from dblp.transport.capture import read_capture
    from dblp.transport.capture_summary import messages_of, rounds_of

    # Scapy warns of the host's interfaces when it is imported, and of what it cannot dissect; here only files are read, and what
    # is none of ours is counted with a reason.
    logging.getLogger("scapy").setLevel(logging.ERROR)
    capture = read_capture(file)
    messages = messages_of(capture)
    rounds = rounds_of(messages)
    show(capture, messages, rounds, Console(), limit)
    if picture is not None:
        from dblp.cli.pcap_figure import draw

        draw(messages, picture, title=file.name)
        typer.echo(f"picture: {picture}")
    if json is not None:
        more = {"capture": _facts(capture), "messages": [message.record() for message in messages]}
        write_json(json, document("pcap", [round_.record() for round_ in rounds], **more))
        typer.echo(f"figures: {json}")


def _facts(capture: Capture) -> dict[str, Any]:
    faults = {fault.name.lower(): count for fault, count in capture.fault_counts.items()}
    return {
        "datagrams": capture.datagrams,
        "records": len(capture.records),
        "cut": capture.cut,
        "faults": faults,
    }


def show(
    capture: Capture,
    messages: Sequence[MessageTrace],
    rounds: Sequence[RoundTrace],
    console: Console,
    limit: int | None,
) -> None:
    """Print what kinds of records there are, rounds, messages that lost or repaired something, and what is none of ours."""
    from dblp.transport.wire import Type

    kinds = Counter(capture.records["type"].tolist())
    names = {int(type_): type_.name for type_ in Type}
    named = ", ".join(f"{names[kind]} {count}" for kind, count in sorted(kinds.items()))
    console.print(
        f"[bold]{capture.datagrams}[/] UDP datagrams, {len(capture.records)} records of ours: {named or 'none'}",
        highlight=False,
    )
    sessions = _sessions(messages)
    if rounds:
        console.print(_round_table(rounds[:limit], sessions))
        _say_left_out(console, len(rounds), limit, "rounds")
    telling = [message for message in messages if message.repairs or message.end != "complete"]
    if telling:
        console.print(_message_table(telling[:limit], sessions))
        _say_left_out(console, len(telling), limit, "messages with repairs, holes or no end")
    elif messages:
        console.print(f"{len(messages)} messages, all complete, none repaired", highlight=False)
    _show_faults(capture, console)


def _say_left_out(console: Console, count: int, limit: int | None, what: str) -> None:
    if limit is not None and count > limit:
        console.print(f"{limit} of {count} {what}; --limit 0 shows all", highlight=False)


def _show_faults(capture: Capture, console: Console) -> None:
    for fault, count in capture.fault_counts.most_common():
        first = next(number for number, found in capture.faults if found is fault)
        console.print(
            f"[yellow]{count} datagrams: {fault.value}[/] (the first is number {first + 1})", highlight=False
        )
    if capture.cut:
        console.print(f"[yellow]{capture.cut} payloads were cut by the capture[/]", highlight=False)


def _sessions(messages: Sequence[MessageTrace]) -> dict[int, str]:
    """What rounds' names begin with, by session; nothing where the capture has one. Groups that were made one after the other, as
    the arms of a run, count their rounds alike."""
    found = dict.fromkeys(message.session for message in sorted(messages, key=lambda m: m.first_s))
    return {session: f"{number}/" if len(found) > 1 else "" for number, session in enumerate(found, 1)}


def _round_table(rounds: Sequence[RoundTrace], sessions: Mapping[int, str]) -> Table:
    from dblp.transport.rounds import round_name
    from dblp.units import format_bytes, format_seconds

    headings = ("round", "start", "took", "msgs", "bytes", "data", "repairs", "missing", "ends")
    of = (
        "session/group:round, sessions in the order in which they came"
        if len(sessions) > 1
        else "group:round"
    )
    table = _table(
        f"rounds ({of}); msgs: messages; data: datagrams with a chunk; ends: how the messages stopped",
        headings,
    )
    for round_ in rounds:
        facts = round_.record()
        ends = ", ".join(f"{count} {end}" for end, count in facts["ends"].items())
        table.add_row(
            f"{sessions[round_.session]}{round_name(round_.group, round_.round)}",
            format_seconds(facts["start_s"]),
            format_seconds(facts["duration_s"]),
            str(facts["messages"]),
            format_bytes(facts["bytes"]),
            str(facts["data"]),
            str(facts["repairs"]),
            str(facts["missing"]),
            ends,
        )
    return table


def _message_table(messages: Sequence[MessageTrace], sessions: Mapping[int, str]) -> Table:
    from dblp.transport.rounds import round_name
    from dblp.units import format_seconds

    headings = (
        "round",
        "step",
        "ranks",
        "chunks",
        "budget",
        "rule",
        "seen",
        "repairs",
        "end",
        "missing",
        "took",
    )
    table = _table("messages that were repaired, have holes, or have no end in the capture", headings)
    for message in messages:
        facts = message.record()
        table.add_row(
            f"{sessions[message.session]}{round_name(message.group, message.round)}",
            str(message.step),
            f"{message.sender}-{'?' if message.receiver is None else message.receiver}",
            _known(message.chunks),
            "?" if message.budget is None else f"{message.budget:.1%}",
            _known(message.stop),
            str(facts["chunks_seen"]),
            str(message.repairs),
            message.end,
            _known(facts["missing"]),
            format_seconds(message.last_s - message.first_s),
        )
    return table


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _table(caption: str, headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, caption=caption, caption_justify="left")
    for heading in headings:
        wide = heading == "ends"
        table.add_column(
            heading, justify="left" if wide or heading in ("rule", "end") else "right", no_wrap=not wide
        )
    return table
