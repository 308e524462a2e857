"""Names of servers and their canaries on a command line, and valid canaries."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import kvref

from kvref.canary import BOS, FIRST_WORD, Canary, Oracle, sized
from kvref_canary.server.dimensions import sizes_of
from kvref_canary.server.url import Address, parse_address
from kvref_conformance.exceptions import CannotRun

__all__ = ["kvref"]

SIZES = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 2, "head_dim": 32, "context": 80, "period": 12}
PROMPT = [BOS, *range(FIRST_WORD, FIRST_WORD + 20)]


@pytest.mark.parametrize(
    "canary",
    [
        Canary(), sized(**SIZES), Canary(intermediate_size=128), Canary((1,), True, theta=1e6, head_dim=128, context=256),
        Canary((20, 20), windows=(20, 20)), sized(**SIZES | {"period": 3}),
    ],
)  # fmt: skip
def test_the_whole_numbers_make_the_canary(canary):
    made = sized(**sizes_of(canary))
    assert Oracle(made).extend(PROMPT) == Oracle(canary).extend(PROMPT) and made.offsets == canary.offsets


@pytest.mark.parametrize(
    ("canary", "said"),
    [
        (Canary((20, 20)), "made with --offsets 13,27, as the judge requests it, got --offsets 20,20"),
        (Canary((20, 20), windows=(21, 21)), "made with --offsets 21,21, as the judge requests it, got --offsets 20,20"),
        (Canary(windows=(16, None)), "--windows 16,16, as the judge requests it, got --offsets 16,31 --windows 16,none"),
        (Canary(theta=2e4), "made with --theta 10000, as the judge requests it, got --theta 20000"),
        (Canary(num_pairs=20), "made with --pairs (default), as the judge requests it, got --pairs 20"),
    ],
)
def test_a_canary_of_other_sizes_is_refused_with_the_options_that_make_one(canary, said):
    with pytest.raises(CannotRun, match=re.escape(said)):
        sizes_of(canary)


def test_a_name_says_all():
    assert parse_address("server:http://h:1/v1/ --canary 'a b'") == Address("http://h:1/v1", Path("a b"))
    assert parse_address("server:https://h/v1 --canary c --model m/n").model == "m/n"
    for wrong in ("ftp://h/v1", "h:1/v1", "http://", "http://h:x/v1", "http://h/v1?a=b", "http://u:p@h/v1"):
        with pytest.raises(CannotRun, match="--server: expected "):
            parse_address(f"server:{wrong} --canary c")
    for wrong in ("http://h/v1", "http://h/v1 --canary", "http://h/v1 --model m", "http://h/v1 --canary 'c"):
        with pytest.raises(CannotRun, match=r"^server:"):
            parse_address(f"server:{wrong}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("check numpy --server http://h/v1 --canary c", "expected a NAME or --server URL, got both: numpy and http://h/v1 "),
        ("check --server http://h/v1", "--server: expected also --canary DIR, the folder that kvref canary make wrote"),
        ("check numpy --model m", "--model: expected also --server URL, to which it applies"),
        ("check numpy --canary c", "--canary: expected also --server URL, to which it applies"),
        ("check --server nonsense --canary c", "--server: expected http://HOST:PORT/v1, got 'nonsense'"),
        ("soak numpy --concurrency 3", "--concurrency: expected also --server URL"),
        ("soak numpy --plot x.svg", "--plot: expected also --server URL"),
        ("soak --server http://h/v1 --canary c --concurrency 0", "--concurrency: expected 1 to 1024, got 0"),
        ("soak --server http://h/v1 --canary c --family paged", "--family: expected no --family with --server"),
    ],
)  # fmt: skip
def test_wrong_combinations_cost_one_line(kvref, arguments, said):
    done = kvref(*arguments.split())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvref: {said}")


def test_others_are_judged_without_an_http_client():
    hidden = "import sys; sys.modules['httpx'] = None; from kvref_conformance.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments, status in (("check numpy --clause BLOCK-01 --examples 1", 0), ("check --server http://h/v1 --canary c", 2)):
        done = subprocess.run([sys.executable, "-c", hidden, *arguments.split()], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
