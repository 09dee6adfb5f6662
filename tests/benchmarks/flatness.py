"""``python -m tests.benchmarks.flatness``: memory, descriptors and threads over thousands of groups, and of rounds.

Two ranks in processes of their own over the torch backend; the store is served by a third, as torchrun's agent does. Each rank
looks at itself at even distances; what counts is the slope behind the first fifth, in which caches fill and the allocator finds
its size. ``--json FILE`` has every look. It ends with 1, and says why, where a process is not flat (``faults``).
"""

# mypy: disable-error-code="attr-defined"
# torch.distributed's stubs miss names that it exports.

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

WORLD_SIZE = 2
LOOKS = 20
"""Looks at a process, at even distances."""
WARM_SHARE = 0.2
"""Share of the looks that is left out of the slope."""
COUNT = 16_384
"""Elements of a round: 64 KiB."""
KINDS = ("groups", "rounds")
MOST_BYTES = {"groups": 4096, "rounds": 256}
"""What each may add to a process's resident memory. The store keeps the keys of each group's meeting, 1.7 KB; a group that
stayed would hold the arena of its datagrams, megabytes."""
NOISE_BYTES = 8 << 20
"""By which the allocator alone may move a process in the whole run, so that short runs are not judged by it."""
MOST_SPREAD = 2
"""Between the least and the most descriptors, and threads, of a process."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a process holds at one time."""

    done: int
    """Groups or rounds so far."""
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Course:
    """How one process fared."""

    kind: str
    """``groups`` or ``rounds``."""
    who: str
    looks: Sequence[Look]
    seconds: float

    @property
    def settled(self) -> Sequence[Look]:
        """The looks that count."""
        return self.looks[int(WARM_SHARE * len(self.looks)) :]

    @property
    def slope_bytes(self) -> float:
        """Bytes of resident memory that each group or round added, by least squares."""
        done = np.array([look.done for look in self.settled], float)
        rss = np.array([look.rss_bytes for look in self.settled], float)
        return float(np.polyfit(done, rss, 1)[0])

    def spread(self, what: str) -> tuple[int, int]:
        """Least and most of a count."""
        found = [getattr(look, what) for look in self.settled]
        return min(found), max(found)


def look(done: int) -> Look:
    """This process, now. Threads are the kernel's: gloo's and the engine's count as well."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir())) - 1  # that of the listing itself
    threads = len(list(Path("/proc/self/task").iterdir()))
    return Look(done, pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads)


def watch(times: int, step: Callable[[int], None], looks: int = LOOKS) -> list[Look]:
    """Do ``step(index)`` so many times, and look in between."""
    found = []
    for index in range(times):
        step(index)
        if (index + 1) * looks // times > index * looks // times:
            found.append(look(index + 1))
    return found


def make_and_destroy(index: int) -> None:
    """A group of all ranks: made, used, destroyed."""
    import torch
    import torch.distributed as dist

    group = dist.new_group()
    dist.all_reduce(tensor := torch.ones(4), group=group)
    assert tensor[0].item() == dist.get_world_size()
    dist.destroy_process_group(group)


def one_round(index: int) -> None:
    """An all-reduce of 64 KiB, and now and then a barrier and a transfer."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(tensor := torch.ones(COUNT))
    assert tensor[0].item() == dist.get_world_size()
    if index % 100 == 0:
        dist.barrier()
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        (dist.send if rank else dist.recv)(torch.ones(COUNT), peer)


STEPS: dict[str, Callable[[int], None]] = dict(zip(KINDS, (make_and_destroy, one_round), strict=True))


def _init(port: int, rank: int) -> None:
    import torch.distributed as dist

    import dblp.collectives.torch.autoload

    dblp.collectives.torch.autoload.autoload()
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=False)
    dist.init_process_group(
        "dblp", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )


def _rank(kind: str, times: int, rank: int, port: int, file: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _init(port, rank)
    begun = time.monotonic()
    course = Course(kind, f"rank {rank}", watch(times, STEPS[kind]), time.monotonic() - begun)
    dist.destroy_process_group()
    Path(file).write_text(json.dumps(asdict(course)))


def _server(pipe: Any, kind: str, file: str) -> None:
    """Serve the store, and look whenever asked for."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    looks, begun = [], time.monotonic()
    while (done := pipe.recv()) is not None:
        looks.append(look(done))
    Path(file).write_text(json.dumps(asdict(Course(kind, "store", looks, time.monotonic() - begun))))


def measure(kind: str, times: int) -> list[Course]:
    """Run ``times`` groups or rounds; the course of each process, that of the store last."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{index}" for index in range(WORLD_SIZE + 1)]
        ours, theirs = context.Pipe()
        server = context.Process(target=_server, args=(theirs, kind, files[-1]))
        server.start()
        port = ours.recv()
        ranks = [
            context.Process(target=_rank, args=(kind, times, rank, port, files[rank]))
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        watcher = threading.Thread(target=_look_at_times, args=(ours, ranks))
        watcher.start()
        for process in ranks:
            process.join()
        watcher.join()
        server.join()
        if any(process.exitcode for process in [*ranks, server]):
            raise RuntimeError(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")
        return [_read(file) for file in files]


def _look_at_times(pipe: Any, ranks: Sequence[Any]) -> None:
    """Have the server look at itself twice a second; its slope is a second's, not a group's."""
    seconds = 0
    while any(process.is_alive() for process in ranks):
        time.sleep(0.5)
        seconds += 1
        pipe.send(seconds)
    pipe.send(None)


def _read(file: str) -> Course:
    raw = json.loads(Path(file).read_text())
    return Course(raw["kind"], raw["who"], [Look(**entry) for entry in raw["looks"]], raw["seconds"])


def bytes_each(course: Course, done: int) -> float:
    """What each of ``done`` groups or rounds added; a store's looks count seconds."""
    return course.slope_bytes * (course.looks[-1].done / done if course.who == "store" else 1.0)


def counts_of(courses: Sequence[Course]) -> dict[str, int]:
    """How many groups and rounds there were."""
    return {course.kind: course.looks[-1].done for course in courses if course.who != "store"}


def faults(courses: Sequence[Course]) -> list[str]:
    """What is not flat; empty if all is well."""
    done, found = counts_of(courses), []
    for course in courses:
        name = f"{done[course.kind]:,} {course.kind}, {course.who}"
        most = MOST_BYTES[course.kind] + NOISE_BYTES / done[course.kind]
        if (each := bytes_each(course, done[course.kind])) > most:
            found.append(f"{name}: {each:.0f} bytes each, more than {most:.0f}")
        for what in ("descriptors", "threads"):
            least, greatest = course.spread(what)
            if greatest - least > MOST_SPREAD:
                found.append(f"{name}: {least} to {greatest} {what}")
    return found


def table(courses: Sequence[Course]) -> str:
    """Markdown: a row a process."""
    lines = [
        "| What | Process | Time | Resident memory, first and last look | Bytes each | Descriptors | Threads |",
        "|---|---|---|---|---|---|---|",
    ]
    done = counts_of(courses)
    for course in courses:
        first, last = course.settled[0].rss_bytes / 2**20, course.settled[-1].rss_bytes / 2**20
        each = bytes_each(course, done[course.kind])
        counts = ["-".join(map(str, sorted(set(course.spread(what))))) for what in ("descriptors", "threads")]
        lines.append(
            f"| {done[course.kind]:,} {course.kind} | {course.who} | {course.seconds:.0f} s | {first:.1f}, {last:.1f} MiB "
            f"| {each:.0f} | {' | '.join(counts)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for, print the table and what is not flat."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=10_000, help="0: none")
    parser.add_argument("--rounds", type=int, default=20_000, help="0: none")
    parser.add_argument("--json", type=Path, help="also write every look here")
    options = parser.parse_args()
    courses = []
    for kind, times in zip(KINDS, (options.groups, options.rounds), strict=True):
        courses += measure(kind, times) if times else []
    sys.stdout.write(table(courses) + "\n")
    if options.json is not None:
        records = [{**asdict(course), "slope_bytes": course.slope_bytes} for course in courses]
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    wrong = faults(courses)
    sys.stdout.writelines(f"not flat: {text}\n" for text in wrong)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
