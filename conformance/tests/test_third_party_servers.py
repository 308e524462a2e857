"""Third-party servers as engines: when one is started, when it is restarted, and that none is left running."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_adapters._shared.server_process import ServerAdapter
from kvref_conformance.drivers.resource_limits import memory_limit

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), str(HERE.parent / "adapters")])  # of the processes that the tests start
SIZES = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 2, "head_dim": 32, "context": 80, "period": 12}
CANARY = sized(**SIZES)
PROMPT = [BOS, *range(FIRST_WORD, FIRST_WORD + 20)]
PROGRAM = """
import os, sys
from pathlib import Path
from fake_server import Fake, Handler, ThreadingHTTPServer
from kvref_canary.files import huggingface
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
server.fake = Fake(huggingface.load(Path(sys.argv[1])))
Path(sys.argv[3]).write_text(str(os.getpid()))
server.serve_forever()
"""


class Theirs(ServerAdapter):
    """The fake server as a program that writes its process id to a file."""

    name = version = language = "fake"

    def __init__(self, number, program=PROGRAM):
        super().__init__()
        self.number, self.program = number, program

    def command(self, canary, folder, port):
        return ["env", f"PYTHONPATH={PATH}", sys.executable, "-c", self.program, str(folder), str(port), str(self.number)]


def alive(number):
    """Whether a process runs and is not a zombie."""
    state = Path(f"/proc/{number}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(number):
    """Whether a process has ended, or ends within a moment."""
    end = time.monotonic() + 10
    while alive(number) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(number)


def says(engine):
    session = engine.open()
    engine.extend(session, PROMPT)
    return engine.generate(session, 5)


def test_a_server_serves_all_engines_of_a_canary_until_it_dies(tmp_path):
    server, number = Theirs(tmp_path / "number"), tmp_path / "number"
    try:
        assert says(server.engine(100, **SIZES)) == PROMPT[-12:-7]
        first = int(number.read_text())
        assert says(server.engine(100, **SIZES)) == PROMPT[-12:-7] and int(number.read_text()) == first
        os.kill(first, 9)
        assert gone(first)
        assert says(server.engine(100, **SIZES)) == PROMPT[-12:-7] and int(number.read_text()) != first
        server.engine(100, **SIZES | {"period": 13})
        second = int(number.read_text())
        server.engine(100, **SIZES | {"period": 14})
        server.engine(100, **SIZES | {"period": 14})
        assert len(server._running) == 2 and alive(second)
    finally:
        for each in server._running.values():
            each.stop()
    assert gone(int(number.read_text())) and gone(second)


def test_no_server_outlives_whoever_began_it(tmp_path):
    program = (
        "import os, pathlib, sys; from test_third_party_servers import SIZES, Theirs\n"
        "server = Theirs(pathlib.Path(sys.argv[1])); server.engine(100, **SIZES); os._exit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "number")], env=os.environ | {"PYTHONPATH": PATH})
    assert ended.returncode == 3 and gone(int((tmp_path / "number").read_text()))


def test_a_server_may_take_more_memory_than_a_check(tmp_path):
    resource = pytest.importorskip("resource")
    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    program = "import resource, sys; sys.exit(f'limit {resource.getrlimit(resource.RLIMIT_DATA)[0]}')"
    with memory_limit(), pytest.raises(RuntimeError, match=f"its last output: limit {hard}"):
        Theirs(tmp_path / "number", program).engine(100, **SIZES)
    assert resource.getrlimit(resource.RLIMIT_DATA) == (limit, hard)


def test_a_server_that_does_not_begin_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="the server did not start; its last output: no such model"):
        Theirs(tmp_path / "number", "raise SystemExit('a line\\nno such model')").engine(100, **SIZES)
