"""What the port does when the kernel says no: libc's calls are wrapped so that a real socket meets each errno."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
from collections.abc import Callable

import pytest

from dblp.errors import LocalError
from dblp.transport import libc
from dblp.transport.port import Burst
from dblp.transport.udp import UdpPort, open_port
from dblp.transport.udp_send import MAX_TEMPLATES, Way
from tests.transport.udp_inbox import CONFIG, LOOPS, SEGMENT, Inbox, cut, random_bytes, run

pytestmark = pytest.mark.sockets

REAL = libc.load()


class Script:
    """Errnos (0: let it pass) for the next sendmsg and sendmmsg calls; afterwards all pass. ``gso``: super-packets fail
    with this errno always. ``most``: sendmmsg takes at most so many a call, while the script lasts."""

    def __init__(self, *errnos: int, gso: int = 0, mmsg: int = 0, most: int = 64) -> None:
        self.errnos, self.gso, self.mmsg, self.most = list(errnos), gso, mmsg, most
        self.calls = libc.Calls(self.sendmsg, self.sendmmsg, REAL.recvmmsg)

    def _next(self) -> int:
        return self.errnos.pop(0) if self.errnos else 0

    def sendmsg(self, fd: int, pointer: int, flags: int) -> int:
        code = self._next() or (self.gso if _is_super(pointer) else 0)
        return _fail(code) if code else REAL.sendmsg(fd, pointer, flags)

    def sendmmsg(self, fd: int, pointer: int, count: int, flags: int) -> int:
        most = self.most if self.errnos else count
        code = self._next() or self.mmsg
        return _fail(code) if code else REAL.sendmmsg(fd, pointer, min(count, most), flags)


def _fail(code: int) -> int:
    ctypes.set_errno(code)
    return -1


def _is_super(pointer: int) -> bool:
    """Whether a msghdr carries UDP_SEGMENT: its control messages are two then."""
    return int.from_bytes(ctypes.string_at(pointer + 40, 8), "little") > 24


async def exchange(script: Script, way: Way, act: Callable[[UdpPort, UdpPort, Inbox, Inbox], object]) -> None:
    """Run ``act(sender, receiver, outbox, inbox)`` with a sender whose calls follow the script."""
    sender, receiver = open_port(CONFIG, way=way, calls=script.calls), open_port(CONFIG)
    outcome = act(sender, receiver, Inbox(sender), Inbox(receiver))
    if asyncio.iscoroutine(outcome):
        await outcome
    for port in (sender, receiver):
        port.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.ENOPROTOOPT])
def test_gso_refused_at_run_time_falls_back_once(code, caplog):
    """A device without checksum offload refuses with EIO what the probe allowed."""
    data = random_bytes(SEGMENT * 44 - 3)

    async def act(sender, receiver, outbox, inbox):
        for _ in range(3):
            assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(132)
        assert inbox.payloads() == 3 * cut(data)
        assert sender.way is Way.SENDMMSG
        assert sender.counters().fallbacks == 1

    with caplog.at_level(logging.WARNING):
        run(asyncio.new_event_loop, lambda: exchange(Script(gso=code), Way.GSO, act))
    [record] = caplog.records
    assert errno.errorcode[code] in record.getMessage() and "SENDMMSG" in record.getMessage()


def test_a_burst_of_more_than_64_segments_does_not_cost_gso():
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(100 * 65)
        assert sender.send(Burst(data, 100, 0, 1, receiver.addresses[0]))
        await inbox.count(65)
        assert inbox.payloads() == cut(data, 100)
        assert sender.way is Way.GSO

    run(asyncio.new_event_loop, lambda: exchange(Script(gso=errno.EINVAL), Way.GSO, act))


def test_a_datagram_that_is_too_long_does_not_cost_gso():
    """EMSGSIZE of both ways is the path's MTU: counted as lost, as a network would drop it."""

    async def act(sender, receiver, outbox, inbox):
        assert sender.send(Burst(random_bytes(SEGMENT * 4), SEGMENT, 0, 1, receiver.addresses[0]))
        assert sender.way is Way.GSO
        assert sender.counters().lost_on_send == 4

    script = Script(*4 * [errno.EMSGSIZE])
    run(asyncio.new_event_loop, lambda: exchange(script, Way.GSO, act))


def test_sendmmsg_missing_falls_back_to_single_calls():
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(SEGMENT * 7 + 5)
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(8)
        assert inbox.payloads() == cut(data)
        assert sender.way is Way.SENDTO
        assert sender.counters().fallbacks == 2

    script = Script(gso=errno.EIO, mmsg=errno.ENOSYS)
    run(asyncio.new_event_loop, lambda: exchange(script, Way.GSO, act))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("code", "counter"), [(errno.EAGAIN, "blocked"), (errno.ENOBUFS, "no_buffers")])
def test_would_block_then_writable(loop, code, counter):
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(SEGMENT * 3)
        burst = Burst(data, SEGMENT, 0, 1, receiver.addresses[0])
        assert not sender.send(burst)
        assert outbox.writable == 0  # never from within send
        await outbox.until(lambda: outbox.writable == 1)
        assert sender.send(burst)
        await inbox.count(3)
        await asyncio.sleep(0.01)
        assert inbox.payloads() == cut(data)
        assert outbox.writable == 1  # once, though the socket stays writable
        assert getattr(sender.counters(), counter) == 1

    run(loop, lambda: exchange(Script(code), Way.GSO, act))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOBUFS])
def test_a_partly_taken_burst_is_finished_before_anything_else(loop, code):
    """sendmmsg takes 5 of 20 datagrams: send says True, the rest is copied, leaves first, and nothing leaves twice."""
    data, after = random_bytes(SEGMENT * 20), random_bytes(64, seed=1)

    async def act(sender, receiver, outbox, inbox):
        to, memory = receiver.addresses[0], data.copy()
        assert sender.send(Burst(memory, SEGMENT, 0, 1, to))
        memory[:] = 0  # the core reuses its memory
        later = Burst(after, SEGMENT, 0, 1, to)
        assert not sender.send(later)
        await outbox.until(lambda: outbox.writable == 1)
        assert sender.send(later)
        await inbox.count(21)
        assert inbox.payloads() == [*cut(data), after.tobytes()]
        assert sender.counters().datagrams_sent == 21

    run(loop, lambda: exchange(Script(0, code, most=5), Way.SENDMMSG, act))


def test_on_writable_is_called_only_after_a_false():
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(SEGMENT * 20)
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(20)
        await asyncio.sleep(0.01)
        assert inbox.payloads() == cut(data)
        assert outbox.writable == 0

    run(asyncio.new_event_loop, lambda: exchange(Script(0, errno.EAGAIN, most=5), Way.SENDMMSG, act))


@pytest.mark.parametrize("way", list(Way))
def test_an_error_of_an_earlier_burst_costs_a_retry_only(way):
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(SEGMENT * 6)
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(6)
        assert inbox.payloads() == cut(data)
        assert sender.counters().lost_on_send == 0

    run(asyncio.new_event_loop, lambda: exchange(Script(errno.ECONNREFUSED), way, act))


def test_an_error_amid_a_burst_neither_repeats_nor_loses():
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(SEGMENT * 20)
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(20)
        assert inbox.payloads() == cut(data)
        assert sender.counters().lost_on_send == 0

    run(asyncio.new_event_loop, lambda: exchange(Script(0, errno.EHOSTUNREACH, most=5), Way.SENDMMSG, act))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENETUNREACH, errno.EACCES])
def test_what_the_kernel_will_not_send_is_lost_and_counted(code, caplog):
    """EPERM: a packet filter's verdict. The port goes on, as after loss on a network, and says it once."""

    async def act(sender, receiver, outbox, inbox):
        burst = Burst(random_bytes(SEGMENT * 5), SEGMENT, 0, 1, receiver.addresses[0])
        assert sender.send(burst)
        assert sender.send(burst)
        assert sender.counters().lost_on_send == 10
        assert sender.send(burst)
        await inbox.count(5)
        assert len(inbox.datagrams) == 5

    with caplog.at_level(logging.WARNING):
        run(asyncio.new_event_loop, lambda: exchange(Script(*4 * [code]), Way.GSO, act))
    [record] = caplog.records
    assert errno.errorcode[code] in record.getMessage()


def test_a_filter_amid_a_burst_loses_the_rest():
    async def act(sender, receiver, outbox, inbox):
        data = random_bytes(SEGMENT * 20)
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(5)
        assert inbox.payloads() == cut(data)[:5]
        assert sender.counters().lost_on_send == 15
        assert sender.send(Burst(data[:64], SEGMENT, 0, 1, receiver.addresses[0]))  # nothing is held back
        await inbox.count(6)

    script = Script(0, *3 * [errno.EPERM], most=5)
    run(asyncio.new_event_loop, lambda: exchange(script, Way.SENDMMSG, act))


def test_an_unknown_error_is_raised_with_its_name():
    async def act(sender, receiver, outbox, inbox):
        with pytest.raises(OSError, match=r"ENOMEM on sending 64 bytes to .*127\.0\.0\.1"):
            sender.send(Burst(random_bytes(64), SEGMENT, 0, 1, receiver.addresses[0]))

    run(asyncio.new_event_loop, lambda: exchange(Script(errno.ENOMEM), Way.GSO, act))


def test_blocking_before_open_is_an_error():
    sender = open_port(CONFIG, calls=Script(errno.EAGAIN).calls)
    with pytest.raises(LocalError, match="before open"):
        sender.send(Burst(random_bytes(64), SEGMENT, 0, 1, sender.addresses[0]))
    sender.close()


def test_closing_while_blocked_calls_nothing():
    async def main():
        for code in (errno.EAGAIN, errno.ENOBUFS):
            sender = open_port(CONFIG, calls=Script(code).calls)
            outbox = Inbox(sender)
            assert not sender.send(Burst(random_bytes(64), SEGMENT, 0, 1, sender.addresses[0]))
            sender.close()
            await asyncio.sleep(0.01)
            assert outbox.writable == 0

    run(asyncio.new_event_loop, main)


def test_templates_are_bounded():
    async def act(sender, receiver, outbox, inbox):
        host, port = receiver.addresses[0]
        data = random_bytes(16)
        for index in range(MAX_TEMPLATES + 10):
            address = type(receiver.addresses[0])(host, 1 + index)
            sender._senders[0]._template(Burst(data, SEGMENT, 0, 1, address), 0)
        assert len(sender._senders[0]._templates) <= MAX_TEMPLATES
        assert sender.send(Burst(data, SEGMENT, 0, 1, receiver.addresses[0]))
        await inbox.count(1)
        assert port

    run(asyncio.new_event_loop, lambda: exchange(Script(), Way.GSO, act))


def test_calls_that_release_the_gil_work_alike():
    async def main():
        ports = [open_port(CONFIG, calls=libc.load(hold_gil=False)) for _ in range(2)]
        inbox, data = Inbox(ports[1]), random_bytes(SEGMENT * 9)
        assert ports[0].send(Burst(data, SEGMENT, 0, 1, ports[1].addresses[0]))
        await inbox.count(9)
        assert inbox.payloads() == cut(data)
        for port in ports:
            port.close()

    run(asyncio.new_event_loop, main)
