"""kvref search: short searches of correct and wrong caches, the state that they keep, and failures that they survive."""

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from commandline import kvref

psutil = pytest.importorskip("psutil")  # a dependency of Dask
pytest.importorskip("distributed", reason="pip install -e '.[search]'")

__all__ = ["kvref"]

MENDS = """
import kvref
from kvref_conformance.families import names
from kvref_conformance.implementations.backends import OnBackend

class Cache(OnBackend):
    name = "mends"
    locals().update(dict.fromkeys(set(names()) - {"paged"}))  # no other family
    def __init__(self):
        super().__init__(kvref.backend("numpy"))
    def paged(self, **config):
        cache = super().paged(**config)
        wrong(cache)
        return cache
"""
WRONG = """
def wrong(cache):
    drop = cache.drop
    def dropped(sequence):
        drop(sequence)
        HOW
    cache.drop = dropped
"""
RAISES = WRONG.replace("HOW", "raise RuntimeError('gone already')")
DIES = WRONG.replace("HOW", "import os; os._exit(3)")
RIGHT = "def wrong(cache): pass\n"


@pytest.mark.parametrize(
    ("member", "clause"),
    [
        pytest.param("paged-append-uses-the-oldest-tables", "PAGED-16", marks=pytest.mark.extended),
        ("buffers-released-twice", "BUF-05"),
    ],
)
def test_what_is_wrong_is_found_from_nothing_in_seconds(kvref, tmp_path, member, clause):
    done = kvref("search", f"zoo:{member}", "--minutes", "0.1", "--workers", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{clause} · any sequence of calls" in done.stdout and "not conformant: breaks" in done.stdout
    traces = list((tmp_path / ".kvref/failures").glob(f"{clause}-*-zoo+{member}.jsonl"))
    assert traces and f"kvref replay {traces[0].relative_to(tmp_path)} zoo:{member}" in done.stdout
    again = kvref("replay", str(traces[0]))
    assert again.returncode == 1 and "first mismatch" in again.stdout


class Page(HTMLParser):
    """The contents of a search's page: headings, and the number of plots with a name."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.plots = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.plots += tag == "svg" and dict(attrs)["role"] == "img" and "over time" in dict(attrs)["aria-label"]


@pytest.mark.long
def test_a_right_cache_is_not_blamed_and_what_was_met_is_kept(kvref, tmp_path):
    done = kvref("search", "numpy", "--minutes", "1", "--workers", "2", "--corpus", "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no failure found in" in done.stdout and not done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    said = json.loads((tmp_path / "kept/corpus.json").read_text())
    families = {family for family, kind, seed in said["seeds"]}
    assert len(families) > 12 and not said["failures"] and not (tmp_path / ".kvref").exists()
    last = said["runs"][0]["points"][-1]
    # Which of these are found, and how many, depends on time: all five in most runs.
    assert last["calls"] > 1000 and last["states"] > 30 and last["transitions"] > 50
    page = Page((tmp_path / "kept/report.html").read_text())
    assert page.tags.count("h1") == 1 and page.plots == page.tags.count("svg") == 4 + 2 * len(last["families"])
    assert "script" not in page.tags


OF_ALL = ("paged.new", "paged.create", "paged.drop!")


def by_shape(corpus):
    return {tuple(each["shape"]): each for each in json.loads(corpus.read_text())["failures"]}


@pytest.mark.long
def test_the_next_search_begins_with_what_was_kept(kvref, tmp_path):
    searched = "search", "mends:Cache", "--minutes", "0.16", "--workers", "1"
    (tmp_path / "mends.py").write_text(RAISES + MENDS)
    first = kvref(*searched)
    assert first.returncode == 1 and "got      RuntimeError: gone already" in first.stdout, first.stdout + first.stderr
    assert first.stdout.count("PAGED-07 · any sequence of calls") == 1  # although nearly all call sequences show it
    corpus = tmp_path / ".kvref/search/mends+Cache/corpus.json"
    failure = by_shape(corpus)[OF_ALL]
    assert failure["times"] > 5
    traces = [tmp_path / ".kvref/failures" / failure["trace"], corpus.parent / "failures" / failure["trace"]]
    assert traces[0].read_text() == traces[1].read_text()

    second = kvref(*searched)
    assert second.returncode == 1 and "still fails: " in second.stdout
    assert "PAGED-07 · any sequence of calls" not in second.stdout  # already known
    assert by_shape(corpus)[OF_ALL]["times"] > failure["times"]

    (tmp_path / "mends.py").write_text(RIGHT + MENDS)
    third = kvref(*searched)
    assert third.returncode == 0 and "fixed: " in third.stdout, third.stdout + third.stderr
    said = json.loads(corpus.read_text())
    assert not said["failures"] and len(said["runs"]) == 3 and "PAGED-07" in said["runs"][2]["mended"]
    assert not any(trace.exists() for trace in traces)
    assert len({int(seed.partition("+")[0]) for _, kind, seed in said["seeds"] if kind == "calls"}) > 3


@pytest.mark.extended
def test_one_that_ends_its_process_is_a_failure_and_costs_no_worker(kvref, tmp_path):
    (tmp_path / "mends.py").write_text(DIES + MENDS)
    done = kvref("search", "mends:Cache", "--minutes", "0.1", "--workers", "1")
    assert done.returncode == 1 and "the process ended with exit code 3" in done.stdout, done.stdout + done.stderr
    assert "lost because a worker ended" not in done.stdout


class Running:
    """A search running in a session of its own, as in a terminal, from the moment its first units are done."""

    def __init__(self, folder, minutes):
        self.folder = folder
        command = [sys.executable, "-m", "kvref_conformance.cli", "search", "numpy", "--minutes", minutes, "--workers", "2"]
        self.process = subprocess.Popen(
            [*command, "--corpus", "kept"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.until(lambda: self.calls() > 0)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def calls(self):
        path = self.folder / "kept/corpus.json"
        return json.loads(path.read_text())["runs"][-1]["points"][-1]["calls"] if path.exists() else 0

    def workers(self):
        return [each for each in self.family if "spawn_main" in " ".join(each.cmdline())]

    def until(self, what, seconds=60):
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end and self.process.poll() is None, self.process.communicate()
            time.sleep(0.2)

    def left(self):
        """The processes of the session that still run some seconds later."""
        _, left = psutil.wait_procs(self.family, timeout=10)
        return [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
def test_a_worker_that_is_killed_costs_nothing(tmp_path):
    running = Running(tmp_path, "0.2")
    killed, *_ = running.workers()
    (own,) = [each for each in killed.children() if "isolated_child" in " ".join(each.cmdline())]
    before = running.calls()
    killed.kill()
    psutil.wait_procs([own], timeout=10)
    assert not own.is_running() or own.status() == psutil.STATUS_ZOMBIE
    out, err = running.process.communicate(timeout=100)
    assert running.process.returncode == 0, out + err
    assert running.calls() > before and "lost" not in out and not err
    assert not running.left()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of a search's temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_ctrl_c_ends_all_and_keeps_everything(tmp_path, temporary):
    running = Running(tmp_path, "30")
    os.killpg(running.process.pid, signal.SIGINT)
    out, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 130
    assert "interrupted: these are the failures found before the interruption" in out and "units, " in out and not err, out + err
    assert json.loads((tmp_path / "kept/corpus.json").read_text())["seeds"] and (tmp_path / "kept/report.html").exists()
    assert not running.left() and not list(temporary.iterdir())


@pytest.mark.extended
@pytest.mark.parametrize("line", ["_load", "__init__"])
def test_ctrl_c_while_workers_start_is_one_line(tmp_path, temporary, line):
    interrupted = tmp_path / "interrupted.py"
    interrupted.write_text(INTERRUPTED.replace("LINE", line))
    command = [sys.executable, interrupted.name, "search", "numpy", "--minutes", "1", "--workers", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvref: interrupted\n")
    assert not list(temporary.iterdir())


INTERRUPTED = """
import os, signal, sys, threading, time
from distributed import Client
from kvref_conformance import cli
from kvref_conformance.fuzz import dask_pool

if __name__ == "__main__":
    where = {"_load": (Client, "submit"), "__init__": (Client, "wait_for_workers")}["LINE"]
    begin = getattr(*where)
    def soon(*args, **options):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(3 if "LINE" == "__init__" else 0)
        return begin(*args, **options)
    setattr(*where, soon)
    sys.exit(cli.main())
"""


CLUSTER = """
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        print(cluster.scheduler_address, flush=True)
        input()
"""


@pytest.mark.extended
def test_the_workers_of_a_cluster_work(kvref, tmp_path):
    (tmp_path / "cluster.py").write_text(CLUSTER)
    command = [sys.executable, "cluster.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        try:
            address = cluster.stdout.readline().strip()
            done = kvref("search", "zoo:blocks-freed-twice", "--minutes", "0.4", "--cluster", address)
            assert done.returncode == 1 and "BLOCK-05" in done.stdout and "by 1 worker\n" in done.stdout, (
                done.stdout + done.stderr
            )
            assert cluster.poll() is None
        finally:
            cluster.communicate("\n", timeout=30)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected an implementation: NAME, --exec COMMAND or --server URL"),
        (("numpy",), "expected --hours N or --minutes N, the duration of the search"),
        (("numpy", "--hours", "-1"), "--hours: expected a finite number above 0, got -1"),
        (("numpy", "--hours", "1", "--minutes", "0"), "--minutes: expected a finite number above 0, got 0"),
        (("numpy", "--hours", "nan"), "--hours: expected a finite number above 0, got nan"),
        (("numpy", "--minutes", "1", "--seed", "-1"), "--seed: expected an integer of at least 0, got -1"),
        (("numpy", "--minutes", "1", "--timeout", "nan"), "--timeout: expected at least 0.01, got nan"),
        (("numpy", "--minutes", "1", "--workers", "0"), "--workers: expected at least 1, got 0"),
        (("numpy", "--minutes", "1", "--workers", "1", "--cluster", "tcp://a:1"), "--workers: expected no --cluster, "),
        (("numpy", "--minutes", "1", "--cluster", "nonsense"), "--cluster: nonsense: no workers"),
        (("nunpy", "--minutes", "1"), "no implementation 'nunpy': did you mean 'numpy'?"),
        (("numpy", "--minutes", "1", "--corpus", "mine.py"), "--corpus: expected a folder, got the file mine.py"),
        (("numpy", "--minutes", "1", "--corpus", "spoiled"), "spoiled/corpus.json cannot be read: JSONDecodeError"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line(kvref, tmp_path, arguments, said):
    (tmp_path / "spoiled").mkdir()
    (tmp_path / "spoiled/corpus.json").write_text("{")
    done = kvref("search", *arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not done.stdout and not (tmp_path / ".kvref").exists()


def test_without_dask_it_says_what_to_install(kvref, tmp_path):
    (tmp_path / "distributed.py").write_text("raise ModuleNotFoundError(name='distributed')\n")  # found before the real module
    done = kvref("search", "numpy", "--minutes", "1")
    assert done.returncode == 2
    assert done.stderr == "kvref: search needs distributed (in a clone: pip install '.[search]')\n"


@pytest.mark.long
def test_two_searches_at_once_do_not_share_a_corpus(kvref, tmp_path, temporary):
    running = Running(tmp_path, "30")
    second = kvref("search", "numpy", "--minutes", "0.1", "--corpus", "kept")
    assert second.returncode == 2 and second.stderr == "kvref: --corpus: kept: in use by another search\n"
    assert running.process.poll() is None
    running.process.terminate()
    running.process.communicate(timeout=60)
    assert not running.left() and not list(temporary.iterdir())  # no processes or files remain, although it was terminated
