"""Time and memory limits restore earlier settings, whatever happens at any moment."""

import os
import signal
import subprocess
import sys
import time
import weakref

import pytest

from kvref_conformance.drivers import resource_limits
from kvref_conformance.drivers.process_group import ProcessGroup
from kvref_conformance.drivers.processor_wait import processor_wait, total_wait
from kvref_conformance.drivers.resource_limits import ALARM_INTERVAL, TimedOut, memory_limit, time_limit

PARTS = {
    each.__code__ for each in (time_limit.__enter__, time_limit.__exit__, time_limit.arm, time_limit.extend, time_limit._leave)
}


@pytest.fixture
def alarms():
    """Alarms of other code, which has its own signal handler."""
    went_off = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: went_off.append(time.monotonic()))
    yield went_off
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def wait_for(alarms):
    end = time.monotonic() + 60
    while not alarms and time.monotonic() < end:
        pass
    assert alarms


def stopped_after(seconds, first=lambda: None):
    with pytest.raises(TimedOut):
        _without_end(seconds, first)


def _without_end(seconds, first):
    with time_limit(seconds):
        first()
        while True:
            pass


def test_what_takes_too_long_is_stopped(alarms):
    stopped_after(0.01)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_time_in_which_the_process_waits_for_a_processor_is_not_counted(monkeypatch):
    waited = iter([100.0, 100.2, *[100.2] * 1000])
    monkeypatch.setattr(resource_limits, "total_wait", lambda: next(waited))
    began = time.monotonic()
    stopped_after(0.05)
    assert time.monotonic() - began > 0.24


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/PID/schedstat")
def test_the_waits_of_this_process_and_of_its_programs_are_read():
    program = ProcessGroup([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own, both = processor_wait(os.getpid()), total_wait()
        assert 0 <= own <= both <= processor_wait(os.getpid()) + processor_wait(program.process.pid)
    finally:
        program.end()
    assert total_wait() >= own and processor_wait(program.process.pid) == 0


def test_a_timer_that_was_running_goes_on_with_the_time_it_had_left(alarms):
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 100, 7)
    with time_limit(200):
        time.sleep(0.05)
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert (50 < left <= 99.95, interval) == (True, 7)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert not alarms


def test_a_timer_whose_time_has_passed_goes_off_at_once(alarms):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    with time_limit(100):
        time.sleep(0.05)
        assert not alarms
    wait_for(alarms)


def test_a_timer_outlives_a_call_that_is_stopped(alarms):
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    stopped_after(0.01)
    wait_for(alarms)


def test_a_limit_inside_a_limit(alarms):
    stopped_after(0.1, first=lambda: stopped_after(0.01))
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_alarm_for_a_call_that_has_ended_is_put_off(alarms):
    with time_limit(100):
        with time_limit(0.05):
            pass
        with time_limit(0.3):
            time.sleep(0.1)
        stopped_after(0.05)
        stopped_after(0.2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert not alarms


def test_an_alarm_that_was_put_off_comes_when_it_is_due(alarms):
    began = time.process_time()
    with time_limit(100):
        with time_limit(0.05):
            pass
        stopped_after(0.2)
    assert time.process_time() - began < 0.2 + ALARM_INTERVAL / 2


def test_a_limit_that_passed_within_another_is_told_of_behind_it(alarms):
    def longer():
        with time_limit(100):
            time.sleep(0.2)

    began = time.process_time()
    stopped_after(0.1, first=longer)
    assert time.process_time() - began < ALARM_INTERVAL / 2


class Slow(set):
    """A weak set that takes long when an object is deleted."""

    def discard(self, item):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
        super().discard(item)


class Item:
    def __del__(self):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass


class Plain:
    pass


@pytest.mark.parametrize("kind", [Plain, Item])
def test_an_alarm_is_not_lost_where_python_ignores_exceptions(alarms, monkeypatch, kind):
    ignored, weak = [], weakref.WeakSet()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    weak.data = Slow()

    def drop():
        weak.add(item := kind())
        del item  # the last reference: weak callbacks run here, and the alarm fires during them

    stopped_after(0.03, first=drop)
    assert not ignored and len(weak) == 0


def test_an_alarm_within_a_finalizer_comes_behind_it(alarms, monkeypatch):
    ignored, ran = [], []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def slowly():
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
        ran.append(True)

    def drop():
        weakref.finalize(item := Plain(), slowly)
        del item  # its finalizer runs here

    stopped_after(0.03, first=drop)
    assert ran and not ignored


def test_a_handler_that_is_not_pythons_is_left_alone(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with time_limit(100):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def at_line(number, act):
    """A trace function that calls `act` at a given line when the limit is set or removed, and records whether it was reached."""
    seen = [0]

    def trace(frame, event, _):
        if frame.f_code not in PARTS:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                act()
        return trace

    return trace, seen


def moments(act):
    """Run a limited block once for each line of the limit's own code, with `act` at that line."""
    number, seen = 0, [1]
    while seen[0] > number:
        number += 1
        trace, seen = at_line(number, act)
        yield trace
    assert number > 12  # the number of lines that were tried


def test_an_alarm_at_any_moment_leaves_nothing_behind(alarms):
    handler = signal.getsignal(signal.SIGALRM)
    for trace in moments(lambda: signal.raise_signal(signal.SIGALRM)):
        sys.settrace(trace)
        try:
            with time_limit(100):
                pass
        finally:
            sys.settrace(None)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGALRM) is handler


def test_ctrl_c_at_any_moment_of_its_end_leaves_nothing_behind(alarms):
    handler = signal.getsignal(signal.SIGALRM)
    for moment in range(2, 9):  # from the second line on: the first line is `try`
        trace, _ = at_line(moment, lambda: signal.raise_signal(signal.SIGINT))
        try:
            with time_limit(100):
                sys.settrace(trace)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), moment
        assert signal.getsignal(signal.SIGALRM) is handler, moment


@pytest.mark.skipif(resource_limits.data_bytes() is None, reason="the system does not say how much memory is used")
def test_a_stricter_limit_of_the_users_stays():
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    own = resource_limits.data_bytes() + 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (own, hard))
    try:
        with memory_limit(2**40):
            assert resource.getrlimit(resource.RLIMIT_DATA) == (own, hard)
        with memory_limit(2**20):
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] < own
        assert resource.getrlimit(resource.RLIMIT_DATA) == (own, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def test_the_strictest_of_several_limits():
    import resource

    assert resource_limits.strictest_limit(5, resource.RLIM_INFINITY, 7) == 5
    assert resource_limits.strictest_limit(5, 3, resource.RLIM_INFINITY) == 3
