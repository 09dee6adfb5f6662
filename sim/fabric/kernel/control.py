"""Congestion control: windows in packets.

Reno: RFC 5681. CUBIC: RFC 9438. DCTCP: RFC 8257, gain 1/16. delay: Swift's (Kumar et al., SIGCOMM 2020) with the constants of
``dblp.transport.congestion.delay``: additive increase below a target round trip, above it a decrease by 0.8 of the excess, at
most halving, once a round trip; loss is not congestion. No pacing: no window is below one packet. Of flows that send in portions
also its filter, its probes for the least round trip and, with a ``flow_target``, its scaling for small windows; those are paced
(``sender.pace``).
"""

from __future__ import annotations

from dblp.sim.fabric.kernel.access import flows, paths, samples, transports
from dblp.sim.fabric.kernel.compiled import compiled, inlined
from dblp.sim.fabric.kernel.sender import filtered, path_of, set_part
from dblp.sim.fabric.kernel.state import CUBIC, DCTCP, DELAY, RENO, SAMPLES_KEPT, World

GAIN = 1.0 / 16.0
BETA = 0.8
MOST = 0.5
FLOW_PACKETS = 100.0
FLOW_TARGET_PS = 4e9
NEARLY_EMPTY = 0.25
"""With portions: of the tolerated queue; below it a window grows four times as fast."""
LIFE_RTTS = 500.0
LEAST_LIFE_PS = 5e11
PROBE_SHARE = 0.02
CUBIC_C = 0.4
CUBIC_BETA = 0.7
PS_PER_S = 1e12
LARGEST = 1e6
"""Packets: windows end here."""


@compiled
def dctcp(w: World, flow: int, marked: int) -> None:
    """RFC 8257, section 3.3; the window ends when what left at its beginning is acknowledged."""
    f = flows(w)[flow]
    f.window_acked += 1
    f.window_marked += marked
    if f.highest >= f.window_end:
        f.alpha += GAIN * (f.window_marked / f.window_acked - f.alpha)
        f.window_acked = 0
        f.window_marked = 0
        f.window_end = f.order
    if marked:
        f.slow_start = 0
        if f.highest >= f.recover:
            f.recover = f.order
            f.window = max(f.window * (1.0 - f.alpha / 2.0), 1.0)
    elif f.slow_start:
        f.window += 1.0
    if not f.slow_start:
        f.window += 1.0 / f.window


@compiled
def take_sample(w: World, flow: int, rtt: int) -> None:
    """The round trip of a portion's last packet."""
    place = path_of(w, flow)
    p = paths(w)[place]
    samples(w)[place * SAMPLES_KEPT + p.samples % SAMPLES_KEPT] = rtt
    p.samples += 1


@inlined
def plain_target(w: World, flow: int) -> float:
    """The round trip that is tolerated of a large window."""
    f = flows(w)[flow]
    t = transports(w)[f.transport]
    return float(t.target) if t.target else t.target_rtts * f.base_rtt


@compiled
def target_of(w: World, flow: int) -> float:
    """The same of any: more of a small window (Swift's flow scaling), where that is asked for."""
    f = flows(w)[flow]
    t = transports(w)[f.transport]
    target = plain_target(w, flow)
    if t.flow_target and f.window < FLOW_PACKETS:
        target += min(FLOW_TARGET_PS * (f.window**-0.5 - FLOW_PACKETS**-0.5), float(t.flow_target))
    return target


@compiled
def delay(w: World, now: int, flow: int, rtt: int) -> None:
    """See the module's docstring."""
    f = flows(w)[flow]
    target = target_of(w, flow)
    if rtt <= target:
        f.window += 1.0 if f.slow_start else 1.0 / f.window
        return
    f.slow_start = 0
    if now - f.last_cut >= f.srtt:
        f.last_cut = now
        f.window = max(f.window * max(1.0 - BETA * (rtt - target) / rtt, MOST), 1.0)


@inlined
def nearly_empty(w: World, flow: int) -> float:
    """Round trips up to which the queue is next to none."""
    least = paths(w)[path_of(w, flow)].least
    return float(least + NEARLY_EMPTY * (plain_target(w, flow) - least))


@compiled
def probe_least(w: World, now: int, flow: int, rtt: float) -> bool:
    """Follow the least round trip; True while it is probed for, with the window at its floor
    (``dblp.transport.congestion.round_trip``; that it may rise after ten seconds is left out)."""
    f, p = flows(w)[flow], paths(w)[path_of(w, flow)]
    life = min(max(LIFE_RTTS * p.least, LEAST_LIFE_PS), float(p.life))
    if rtt <= nearly_empty(w, flow):
        p.least, p.least_at = min(p.least, rtt), now
    if p.before_probe > 0.0:
        if now >= p.probe_until:
            f.window, p.before_probe = p.before_probe, 0.0
            p.least_at, p.life = now, 2 * p.life
            set_part(w, flow)
            return False
    elif now - p.least_at > life:
        p.before_probe, f.window = f.window, 2.0
        p.probe_until = now + int(rtt + max(PROBE_SHARE * life, p.least))
        set_part(w, flow)
    return bool(p.before_probe > 0.0)


@compiled
def delay_of_path(w: World, now: int, flow: int, rtt: int, acked: int) -> None:
    """The same where flows share a path's window: an answer tells of many packets, and the least of the last round trips
    counts."""
    f = flows(w)[flow]
    take_sample(w, flow, rtt)
    least, target = filtered(w, flow), target_of(w, flow)
    if probe_least(w, now, flow, least):
        return
    if least > target:
        f.slow_start = 0
        if now - f.last_cut >= least:
            f.last_cut = now
            f.window = max(f.window * max(1.0 - BETA * (least - target) / least, MOST), 2.0)
            set_part(w, flow)
        return
    near = nearly_empty(w, flow)
    f.window += float(acked) if f.slow_start else (4.0 if least < near else 1.0) * acked / f.window
    set_part(w, flow)


@compiled
def cubic(w: World, now: int, flow: int) -> None:
    """RFC 9438, sections 4.2 to 4.4, in packets and seconds."""
    f = flows(w)[flow]
    if f.cubic_epoch == 0:
        f.cubic_epoch = now
        f.cubic_max = max(f.cubic_max, f.window)
        f.alpha = f.window
    rtt = f.srtt / PS_PER_S
    since = (now - f.cubic_epoch) / PS_PER_S + rtt
    root = (f.cubic_max * (1.0 - CUBIC_BETA) / CUBIC_C) ** (1.0 / 3.0)
    goal = CUBIC_C * (since - root) ** 3 + f.cubic_max
    f.alpha += (
        3.0 * (1.0 - CUBIC_BETA) / (1.0 + CUBIC_BETA) / f.window
    )  # Reno's window, for the friendly region
    goal = max(min(goal, 1.5 * f.window), f.alpha)
    if goal > f.window:
        f.window += (goal - f.window) / f.window


@compiled
def on_acked(w: World, now: int, flow: int, rtt: int, marked: int) -> None:
    """A packet was acknowledged."""
    f = flows(w)[flow]
    control = transports(w)[f.transport].control
    if control == DCTCP:
        dctcp(w, flow, marked)
    elif control == DELAY:
        delay(w, now, flow, rtt)
    elif control == CUBIC and f.window >= f.threshold:
        cubic(w, now, flow)
    elif control in (RENO, CUBIC):
        f.window += 1.0 if f.window < f.threshold else 1.0 / f.window
    f.window = min(f.window, LARGEST)


@compiled
def on_path_acked(w: World, now: int, flow: int, rtt: int, acked: int, marked: int) -> None:
    """So many packets of a path were acknowledged at once, some of them marked."""
    if acked and transports(w)[flows(w)[flow].transport].control == DELAY:
        delay_of_path(w, now, flow, rtt, acked)
        return
    for number in range(acked):
        on_acked(w, now, flow, rtt, 1 if number < marked else 0)
    set_part(w, flow)


@compiled
def on_lost(w: World, flow: int, order: int) -> None:
    """A packet is lost: one decrease for all that left before the last one."""
    f = flows(w)[flow]
    control = transports(w)[f.transport].control
    if order < f.recover or control not in (RENO, CUBIC, DCTCP):
        return
    f.recover = f.order
    f.slow_start = 0
    f.cubic_epoch = 0
    f.cubic_max = f.window
    f.window = max(f.window * (CUBIC_BETA if control == CUBIC else 0.5), 1.0)
    f.threshold = max(f.window, 2.0)


@compiled
def on_timeout(w: World, now: int, flow: int) -> None:
    """Nothing came back for a retransmission timeout."""
    f = flows(w)[flow]
    control = transports(w)[f.transport].control
    f.recover = f.order
    f.cubic_epoch = 0
    if control in (RENO, CUBIC, DCTCP):
        f.threshold = max(f.window / 2.0, 2.0)
        f.window = 1.0
        f.slow_start = 1
    elif control == DELAY and now - f.last_cut >= f.srtt:
        f.last_cut = now
        f.window = max(f.window * MOST, 1.0)
