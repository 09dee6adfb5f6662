"""Work objects: waiting, futures, errors and callbacks, without a network."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dblp.collectives.numbering import Callback, Origin
from dblp.collectives.numbering import Future as Counted
from dblp.collectives.torch.staging import Arrival
from dblp.collectives.torch.tensors import Staged, restore_all
from dblp.collectives.torch.work import DblpWork, JoinedWork, completer
from dblp.errors import DeadlineError
from dblp.transport.places import place_name
from tests.torch.standin import StandIn


def work(outputs=(), restore=None, timeout_s=5.0):
    return DblpWork("all_reduce", timeout_s, list(outputs), restore)


def test_wait_returns_once_finished():
    item = work()
    assert not item.is_completed()
    threading.Timer(0.01, item.finish, (None, None)).start()
    assert item.wait()
    assert item.wait()  # again, at once
    assert item.is_completed() and item.is_success() and item.exception() is None


def test_errors_reach_every_way_of_waiting():
    item = work()
    future = item.get_future()
    error = DeadlineError("rank 3 is missing", [3])
    item.finish(None, error)
    with pytest.raises(
        dist.DistBackendError, match="all_reduce: Timed out waiting 5000ms: rank 3 is missing"
    ) as caught:
        item.wait()
    assert caught.value.__cause__ is error
    with pytest.raises(RuntimeError, match="rank 3 is missing"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 3 is missing"):
        item.get_future().wait()
    assert item.exception() is error and not item.is_success()


def test_a_short_wait_times_out_and_the_work_goes_on():
    item = work()
    with pytest.raises(dist.DistBackendError, match="Timed out waiting 5ms in wait"):
        item.wait(timedelta(milliseconds=5))
    item.finish(None, None)
    assert item.wait()


def test_a_deadline_is_told_in_the_words_that_scripts_look_for():
    item = work(timeout_s=2.0)
    item.finish(None, DeadlineError("rank 3 is missing", [3]))
    with pytest.raises(dist.DistBackendError, match=r" Timed out waiting 2000ms: rank 3 is missing"):
        item.wait()


def test_what_comes_before_the_end_has_run_when_wait_returns():
    calls = []
    item = work()
    assert item.before_end(lambda: calls.append(item.is_success()))
    item.finish(None, None)
    assert item.wait() and calls == [True]
    assert not item.before_end(lambda: calls.append(None)), "too late"
    assert calls == [True]


@pytest.mark.parametrize("asked_first", [True, False])
def test_the_future_holds_the_outputs(asked_first):
    tensor = torch.ones(2)
    item = work([tensor])
    if asked_first:
        future = item.get_future()
        item.finish(None, None)
    else:
        item.finish(None, None)
        future = item.get_future()
    assert future.wait()[0] is tensor
    assert item.get_future() is future
    assert item.result()[0] is tensor


def test_a_callback_may_wait_for_another_work():
    """As PowerSGD's does; many at once, more than there are idle threads."""
    firsts, seconds = [work() for _ in range(40)], [work() for _ in range(40)]
    chained = [
        first.get_future().then(lambda _, second=second: second.wait())
        for first, second in zip(firsts, seconds, strict=True)
    ]
    for first in firsts:
        first.finish(None, None)
    for second in reversed(seconds):
        second.finish(None, None)
    assert all(future.wait() for future in chained)


@pytest.mark.parametrize("early", [True, False])
def test_what_callbacks_call_has_its_place(early):
    """Whenever they are added, on whatever thread they run, and down the chain."""
    first, made = work(), {}

    def call(name):
        def run(_):
            made[name] = [work().origin, work().origin]

        return run

    if not early:
        first.finish(None, None)
        first.get_future().wait()
    chained = first.get_future().then(call("first")).then(call("chained"))
    first.get_future().add_done_callback(call("second"))
    joined = JoinedWork("coalesced", 5.0, [first])
    of_joined = joined.get_future().then(call("of joined"))
    if early:
        first.finish(None, None)
    chained.wait(), of_joined.wait()
    for _ in range(500):  # add_done_callback has nothing to wait for
        if len(made) == 4:
            break
        time.sleep(0.01)
    assert {name: [place_name(origin._code) for origin in origins] for name, origins in made.items()} == {
        "first": ["1:1", "1:2"],
        "chained": ["1.1:1", "1.1:2"],
        "second": ["2:1", "2:2"],
        "of joined": ["4:1", "4:2"],  # the third is its own
    }
    assert {origin._root for origins in made.values() for origin in origins} == {first.origin}
    assert work().origin._root is None, "not within a callback"


def test_a_work_leaves_nothing_for_the_garbage_collector():
    """Training loops switch it off."""

    def left():
        return sum(type(found) in (Origin, Callback, Counted) for found in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = left()
        for _ in range(50):
            item = work()
            item.finish(None, None)
            assert item.get_future().then(lambda _: work()).then(lambda _: None).wait() is None
        del item
        assert left() <= before + 3, "a completion thread may hold the last"
    finally:
        gc.enable()


def test_other_futures_are_left_as_they_are():
    work().get_future()
    plain: torch.futures.Future[int] = torch.futures.Future()
    seen = []

    def call(future):
        seen.append(work())
        return future.value() + 1

    chained = plain.then(call)
    plain.add_done_callback(lambda _: seen.append(work()))
    plain.set_result(1)
    assert chained.wait() == 2
    assert [item.origin._root for item in seen] == [None, None]
    assert "then" in torch._C.Future.then.__name__ and torch._C.Future.then.__doc__


def test_an_error_in_a_callback_is_still_its_futures():
    item = work()

    def fail(_):
        raise ValueError("not this one")

    chained = item.get_future().then(fail)
    item.finish(None, None)
    with pytest.raises(RuntimeError, match="not this one"):
        chained.wait()
    assert work().origin._root is None, "the thread has left the callback"


def test_restoring_happens_before_the_end_and_off_the_engine_thread():
    threads = []

    def restore():
        threads.append(threading.current_thread())
        return []

    item = work(restore=restore)
    item.finish(None, None)
    item.wait()
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_failing_restore_is_the_works_error():
    def restore():
        raise RuntimeError("the GPU fell off the bus")

    item = work(restore=restore)
    item.finish(None, None)
    with pytest.raises(dist.DistBackendError, match="fell off"):
        item.wait()


def test_joined_works_end_with_the_last():
    parts = [work([torch.zeros(1)]), work([torch.ones(1)])]
    joined = JoinedWork("coalesced", 5.0, parts)
    assert [tensor.item() for tensor in joined.result()] == [0, 1]
    parts[1].finish(None, None)
    assert not joined.is_completed()
    parts[0].finish(None, None)
    assert joined.wait()
    assert JoinedWork("nothing", 5.0, []).wait()


def copied_back(device, value):
    """A work whose result is copied back to a device, and its tensor."""
    tensor = torch.zeros(2)
    source = torch.full((2,), value)
    return work([tensor], lambda: [Arrival(device, device.copy_back(tensor, source))]), tensor


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("ends_last", [0, 1])
def test_joined_works_wait_for_every_copy_back(devices, ends_last):
    """Copies are queued as rounds end, not in the order of the works; and works may be on several devices."""
    stand_ins = [StandIn(copy_s=0.1) for _ in range(devices)]
    parts, tensors = zip(
        *(copied_back(stand_ins[index % devices], index + 1.0) for index in range(2)), strict=True
    )
    joined = JoinedWork("coalesced", 5.0, parts)
    for index in (1 - ends_last, ends_last):
        parts[index].finish(None, None)
        parts[index].get_future().wait()  # unlike wait(), leaves the stream alone
    joined.wait()
    for device, tensor, value in zip(2 * stand_ins, tensors, (1.0, 2.0), strict=False):
        assert device.read(tensor).tolist() == [value] * 2


def test_what_comes_back_on_several_devices_is_waited_for_on_each():
    stand_ins = [StandIn(copy_s=0.1) for _ in range(2)]
    tensors = [device.own(torch.zeros(2)) for device in stand_ins]
    staged = [
        Staged(tensor, tensor.numpy(), None, True, device, torch.full((2,), 3.0))
        for device, tensor in zip(stand_ins, tensors, strict=True)
    ]
    item = work(tensors, lambda: restore_all(staged))
    item.finish(None, None)
    item.wait()
    assert all(
        device.read(tensor).tolist() == [3.0] * 2 for device, tensor in zip(stand_ins, tensors, strict=True)
    )


def test_joined_works_may_have_outputs_of_their_own():
    tensor, calls = torch.zeros(1), []
    part = work([torch.ones(1)])

    def restore():
        calls.append(tensor.add_(5))
        return []

    joined = JoinedWork("folded", 5.0, [part], [tensor], restore)
    part.finish(None, None)
    assert joined.get_future().wait() == [tensor] and tensor.item() == 5 and len(calls) == 1


def test_joined_works_tell_the_limit_of_the_one_that_failed():
    parts = [work(timeout_s=9.0), work(timeout_s=2.0)]
    joined = JoinedWork("coalesced", 9.0, parts)
    parts[0].finish(None, None)
    parts[1].finish(None, DeadlineError("late"))
    with pytest.raises(dist.DistBackendError, match="Timed out waiting 2000ms: late"):
        joined.wait()


def test_joined_works_fail_with_any():
    parts = [work(), work()]
    joined = JoinedWork("coalesced", 5.0, parts)
    parts[0].finish(None, DeadlineError("late"))
    parts[1].finish(None, None)
    with pytest.raises(dist.DistBackendError, match="late"):
        joined.wait()


def test_completion_threads_are_kept_few():
    gate, left = threading.Event(), threading.Semaphore(0)

    def block():
        gate.wait()
        left.release()

    for _ in range(30):
        completer.submit(block)
    gate.set()
    for _ in range(30):
        assert left.acquire(timeout=10)
    for thread in list(completer._threads):
        if len(completer._threads) > 8:
            thread.join(1)
    assert len(completer._threads) <= 8
