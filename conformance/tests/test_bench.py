"""The benchmarks: what they print and write, and their error messages. Of times, only how they grow is tested."""

import json
from xml.etree import ElementTree

import pytest
from commandline import run_kvref

from kvref_bench import baselines, comparison, growth, prefix_managers, prefixes


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        return run_kvref("bench", *arguments, folder=tmp_path)

    return run


@pytest.mark.parametrize("prepare", growth.GROWING, ids=lambda prepare: prepare.__name__)
def test_costs_of_the_reference_are_linear(prepare):
    """A linear cost has a ratio of 4, a quadratic one of 16 for large counts."""
    assert growth.measure_growth(prepare, growth.GROWING[prepare]).ratio < 8


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


def test_a_kernel_is_asked_for_in_one_shape_or_in_all(bench, tmp_path):
    for only, shapes in (("quantize int8 2 x 64", ["2 x 64"]), ("quantize int8", ["8 x 128", "2 x 64", "1 x 576"])):
        assert bench("numpy", "--only", only, "--size", "1", "--json", "b.json").returncode == 0
        contests = json.loads((tmp_path / "b.json").read_text())["contests"]
        assert [each["shape"] for each in contests] == shapes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nump"], "backend: expected one of reference, cupy, numpy, torch, torch-compiled, got 'nump'"),
        (["numpy", "--only", "nothing*"], "--only nothing*: no contest matches"),
        (["numpy", "--size", "0"], "--size: expected at least 1 MB, got 0"),
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
    assert baselines.are_installed("numpy", "numpy.linalg")
    assert not baselines.are_installed("numpy", "no_such_package.part")


def test_rivals_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(comparison, "PACKAGES", ("numpy", "no-such-package", "vllm"))
    assert comparison.missing_packages() == ["no-such-package", *([] if baselines.are_installed("vllm") else ["vllm"])]


@pytest.fixture
def small(monkeypatch):
    for name, size in {"TOKENS": 2048, "POOL": 1000, "NUM_PROMPTS": 15, "BLOCK_SIZE": 16}.items():
        monkeypatch.setattr(prefixes, name, size)


class Fake:
    """An engine that finds the prompts that it kept, and records its requests."""

    name = "fake"

    def __init__(self):
        self.kept, self.served = [], []

    def prepare(self, tokens):
        return tuple(tokens)

    def find(self, prompt):
        return len(prompt) if prompt in self.kept else 0

    def serve(self, tokens, *, keep):
        hit = self.find(self.prepare(tokens))
        self.served.append((hit, keep))
        self.kept += [self.prepare(tokens)] * keep
        return hit


def test_engines_do_the_job_that_the_prefix_cache_does(small, monkeypatch):
    def all_here(seen, *sizes):
        fake = Fake()
        for tokens in seen:
            fake.serve(tokens, keep=True)
        fake.served.clear()
        fakes.append(fake)
        return [fake]

    fakes = []
    monkeypatch.setattr(prefix_managers, "prefix_managers", all_here)
    match, branches, begin, evict = prefixes.prefix_contests([], lambda title: "fork" not in title)
    for each in match, branches:
        found = {entry.label: entry.run() for entry in each.entries}
        assert found == {"kvref prefix": 2032, "python: a chain of hash() of tuples": 128, "fake": 2048, "fake, prepared": 2048}
    for entry in begin.entries + evict.entries:
        entry.run()
    assert [entry.label for entry in begin.entries] == ["kvref prefix, a hit", "kvref prefix, cold", "fake, a hit", "fake, cold"]
    assert [each.served for each in fakes] == [[], [], [(2048, False), (0, False)], [(0, True)]]


@pytest.mark.parametrize("name", ["vllm KVCacheManager", "sglang RadixCache", "sglang UnifiedRadixCache"])
def test_an_engine_finds_what_a_prefix_cache_finds(name):
    if not baselines.are_installed("torch", name.split()[0]):
        pytest.skip(f"{name.split()[0]} is not installed")
    kept, cold = list(range(1, 129)), list(range(1001, 1129))
    (engine,) = (each for each in prefix_managers.prefix_managers([kept], 64, 16, 128) if each.name == name)
    assert engine.find(engine.prepare(kept)) == 112  # not all: the logits of the last token are needed
    assert (engine.serve(cold, keep=False), engine.serve(cold, keep=True), engine.serve(cold, keep=False)) == (0, 0, 112)
    assert engine.find(engine.prepare([*kept[:40], *cold[40:]])) == 32
    for start in range(10**4, 10**5, 1000):  # more than the pool has: blocks are evicted
        assert engine.serve(list(range(start, start + 128)), keep=True) == 0
    assert engine.find(engine.prepare(kept)) == 0


def test_a_ratio_is_the_median_of_rounds_by_the_memcpy_of_the_same_round(monkeypatch):
    now, speed = [0.0], [1.0]

    def taking(seconds):
        def run():
            now[0] += seconds * speed[0]

        return run

    def faster_and_slower():  # called last in each round (memcpy, entries): the speed of the machine alternates between rounds
        speed[0] = 3.0 - speed[0]

    monkeypatch.setattr(comparison, "perf_counter", lambda: now[0])
    place = comparison.Machine(lambda size: taking(size * 1e-6))
    entries = [comparison.Contender("four times", taking(4.0), place), comparison.Contender("turn", faster_and_slower, place)]
    four, _ = comparison.run_comparison(comparison.Comparison("work", "", 2 * 10**6, entries, data=5 * 10**5)).scores
    assert four.of_bytes == pytest.approx((4.0, 4.0, 4.0))
    assert four.of_data == pytest.approx((8.0, 8.0, 8.0))
    assert {round(each) for each in four.seconds} <= {4, 6, 8}
