"""What the interpreter's switch interval does to an engine thread beside a busy pure-Python main thread.

    python tests/benchmarks/switch_interval.py [--seconds 1.5]

The engine waits (which releases the interpreter lock), works on a batch, and waits again. ``raised`` is the
variant that the engine does not use: 5 ms while it works, 50 us while it waits. Prints batches a second.
"""

# ruff: noqa: T201

import argparse
import os
import select
import sys
import threading
import time

INTERVALS = {"5 ms": 5e-3, "200 us": 200e-6, "50 us": 50e-6, "10 us": 10e-6, "raised": 50e-6}


def work(steps: int) -> int:
    total = 0
    for step in range(steps):
        total += step
    return total


def batches_a_second(name: str, steps: int, seconds: float, busy: bool) -> float:
    """Run an engine thread for ``seconds`` with batches of ``steps``, with or without a busy main thread."""
    reader, writer = os.pipe()
    os.write(writer, b"x")
    poll = select.epoll()
    poll.register(reader, select.EPOLLIN)
    stop, count = threading.Event(), 0

    def engine() -> None:
        nonlocal count
        while not stop.is_set():
            poll.poll(0.001)
            if name == "raised":
                sys.setswitchinterval(5e-3)
            work(steps)
            count += 1
            if name == "raised":
                sys.setswitchinterval(50e-6)

    before = sys.getswitchinterval()
    sys.setswitchinterval(INTERVALS[name])
    thread = threading.Thread(target=engine)
    end = time.perf_counter() + seconds
    thread.start()
    while time.perf_counter() < end:
        work(20) if busy else time.sleep(0.01)
    stop.set()
    thread.join()
    sys.setswitchinterval(before)
    poll.close()
    os.close(reader)
    os.close(writer)
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1.5)
    seconds = parser.parse_args().seconds
    print(f"{'steps':>8} {'idle main':>10} " + " ".join(f"{name:>8}" for name in INTERVALS))
    for steps in (1000, 4000, 16_000):
        idle = batches_a_second("50 us", steps, seconds, busy=False)
        rates = [batches_a_second(name, steps, seconds, busy=True) for name in INTERVALS]
        print(f"{steps:>8} {idle:>10.0f} " + " ".join(f"{rate:>8.0f}" for rate in rates))


if __name__ == "__main__":
    main()
