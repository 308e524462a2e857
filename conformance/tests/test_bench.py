"""The bench: what it shows and writes, and what it says of mistakes. How long things take is not tested."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from kvref_conformance.bench import contest, rivals


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        command = [sys.executable, "-m", "kvref_conformance.cli", "bench", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    return run


def test_it_shows_a_table_and_writes_figures_and_a_plot(bench, tmp_path):
    done = bench("numpy", "--only", "decode float8_e5m2", "--size", "1", "--json", "b.json", "--plot", "b.svg")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 or "cores" in max(lines, key=len)
    assert "decode float8_e5m2 (values, 1.25 MB to move)" in done.stdout
    assert any(line.lstrip().startswith("kvref numpy") for line in lines)
    document = json.loads((tmp_path / "b.json").read_text())
    (contest,) = document["contests"]
    assert contest["bytes"] == 2**20 * 5 // 4
    whose = {score["who"]: score for score in contest["scores"]}
    assert {"kvref numpy", "ml_dtypes"} <= set(whose)
    for score in whose.values():
        median, low, high = score["of_bytes"]
        assert 0 < low <= median <= high
    assert document["machine"]["packages"]["numpy"]
    drawn = ElementTree.parse(tmp_path / "b.svg").getroot()
    assert "decode float8_e5m2 (values)" in [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nump"], "backend: expected one of reference, cupy, numpy, torch, torch-compiled, got 'nump'"),
        (["numpy", "--only", "nothing*"], "--only nothing*: no contest matches"),
        (["numpy", "--size", "0"], "--size: expected at least 1 megabyte, got 0"),
        (["numpy", "--json", "no/such/b.json"], "--json: no folder "),
        (["numpy", "--plot", "."], "--plot: . is a folder"),
    ],
)
def test_a_mistake_costs_one_line(bench, arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"kvref: {message}")


def test_what_moves_no_data_can_be_drawn_too(bench, tmp_path):
    done = bench("numpy", "--only", "bookkeeping of 64 sequences at 1k", "--plot", "b.svg")
    assert (done.returncode, done.stderr) == (0, "")
    ElementTree.parse(tmp_path / "b.svg")


def test_a_step_in_a_window_is_held_against_the_reading_of_it(bench, tmp_path):
    done = bench("numpy", "--only", "step of a token in a window*", "--json", "b.json")
    assert (done.returncode, done.stderr) == (0, "")
    (contest,) = json.loads((tmp_path / "b.json").read_text())["contests"]
    assert contest["bytes"] == 2 * 4096 * 8 * 128 * 4
    assert contest["scores"][0]["who"] == "kvref windowed numpy"


def test_a_rival_whose_package_is_missing_is_left_out():
    assert rivals.here("numpy", "numpy.linalg")
    assert not rivals.here("numpy", "no_such_package.part")


def test_a_ratio_is_the_median_of_rounds_by_the_memcpy_of_the_same_round(monkeypatch):
    now, speed = [0.0], [1.0]

    def taking(seconds):
        def run():
            now[0] += seconds * speed[0]

        return run

    def faster_and_slower():  # after each round, as this machine does: the memcpy, the entries, and this one last
        speed[0] = 3.0 - speed[0]

    monkeypatch.setattr(contest, "perf_counter", lambda: now[0])
    place = contest.Place(lambda size: taking(size * 1e-6))
    entries = [contest.Entry("four times", taking(4.0), place), contest.Entry("turn", faster_and_slower, place)]
    four, _ = contest.hold(contest.Contest("work", "", 2 * 10**6, entries, data=5 * 10**5)).scores
    assert four.of_bytes == pytest.approx((4.0, 4.0, 4.0))
    assert four.of_data == pytest.approx((8.0, 8.0, 8.0))
    assert {round(each) for each in four.seconds} <= {4, 6, 8}
