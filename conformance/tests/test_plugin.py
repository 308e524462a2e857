"""The verdicts of the pytest plugin are those of the command."""

from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[1] / "adapters"
ML_DTYPES = "kvref_adapters.ml_dtypes.adapter:MlDtypes"
WORKERS = pytest.param(("-n", "2"), marks=pytest.mark.long)


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ADAPTERS))

    def run(*arguments):
        quick = ("-p", "no:cacheprovider", "--kvref-examples", "5")
        return pytester.runpytest_subprocess("--pyargs", "kvref_conformance", *quick, *arguments)

    return run


def test_a_clause_is_a_test_with_its_id(run):
    result = run("--kvref", "numpy", "-k", "PAGED-07", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*families/paged/checks.py::PAGED-07?numpy? PASSED*"])


def test_every_clause_is_collected_once_for_each_implementation(run):
    result = run("--kvref", "numpy", "--kvref", "reference", "--collect-only", "-q", "--kvref-clause", "B*")
    names = [line.rpartition("::")[2] for line in result.outlines if "::" in line]
    want = [
        f"{clause}-0{n}[{name}]"
        for name in ("numpy", "reference")
        for clause, last in (("BLOCK", 7), ("BUF", 9))
        for n in range(1, last + 1)
    ]
    assert sorted(names) == sorted(want)


def test_a_failure_shows_expected_and_got(run, pytester):
    pytester.makepyfile(
        mine="""
        import kvref
        from kvref_conformance.implementations.backends import OnBackend

        class Warm(OnBackend):
            name = "warm"
            def __init__(self):
                super().__init__(kvref.reference)
            def buffers(self, max_buffers):
                pool = kvref.BufferPool(max_buffers)
                pool.acquire(1)  # a request before any request
                pool.acquire(1).release()
                pool.acquire(1)
                return pool
        """
    )
    result = run("--kvref", "mine:Warm", "--kvref-clause", "BUF-07", "--kvref-family", "buffers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*expected 0.0", "*got *", "*again    kvref check *"])


def test_not_offered_is_a_skip_that_says_so(run):
    result = run("--kvref", ML_DTYPES, "--kvref-clause", "PAGED-07", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not offered: family paged*"])


def test_an_unknown_name_is_a_usage_error(run):
    result = run("--kvref", "nump")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'numpy'" in result.stderr.str() + result.stdout.str()


@pytest.mark.extended
def test_workers_carry_the_same_verdicts(run):
    result = run("--kvref", "numpy", "--kvref-clause", "BLOCK-*", "-n", "2")
    result.assert_outcomes(passed=7)


NAMESAKES = """
    import kvref
    from kvref_conformance.implementations.backends import OnBackend

    class Right(OnBackend):
        name = "pool"
        def __init__(self):
            super().__init__(kvref.reference)

    class Wrong(Right):
        def blocks(self, num_blocks):
            class Pool(kvref.BlockPool):
                def free(self, block):
                    pass
            return Pool(num_blocks)

    class Little:
        name, version, language, level, formats = "little", "1", "python", "exact", ()
        asarray = to_numpy = staticmethod(lambda values: values)
        def blocks(self, num_blocks):
            class Pool:
                num_blocks = property(lambda self: 0)
            return Pool()
"""


@pytest.mark.parametrize("workers", [(), WORKERS], ids=["alone", "workers"])
def test_namesakes_keep_to_themselves(run, pytester, workers):
    pytester.makepyfile(mine=NAMESAKES)
    both = ("--kvref", "mine:Wrong", "--kvref", "mine:Right", "--kvref", "mine:Wrong")  # duplicates are judged once
    result = run(*both, "--kvref-clause", "BLOCK-05", "-v", *workers)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines_random(["*BLOCK-05?mine:Wrong?*", "*BLOCK-05?mine:Right?*"])
    assert [path.name for path in (pytester.path / ".kvref/failures").iterdir()] == ["BLOCK-05-mine+Wrong.jsonl"]
    result.stdout.fnmatch_lines_random(
        [
            "mine:Wrong: not conformant; 1 of 1 selected clauses judged",
            "mine:Right: conformant for the selected clauses: 1 of 1 judged, all passed",
        ]
    )


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.long)], ids=["alone", "workers"])
def test_too_little_judged_is_no_success(run, pytester, workers):
    pytester.makepyfile(mine=NAMESAKES)
    result = run("--kvref", "mine:Little", "--kvref-clause", "BLOCK-0[245]", *workers)
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["mine:Little: not judged: 0 of 3 selected clauses have a verdict"])
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result = run("--kvref", "numpy", "--kvref-clause", "BLOCK-05", "--kvref-clause", "BUF-07", *workers)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK


def test_how_much_is_enough_can_be_said(run):
    half = ("--kvref", ML_DTYPES, "--kvref-clause", "FMT-FP8-01,FMT-CAST-0*")
    little = run(*half, "--kvref-least-judged", "100")
    assert "judged, all passed" in little.stdout.str()
    assert run(*half, "--kvref-least-judged", "0").ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --kvref NAME, the implementation to judge"),
        (("--kvref", "numpy", "--kvref-clause", "BLOCK-5"), "--kvref-clause BLOCK-5: no clause matches: did you mean BLOCK-05?"),
        (("--kvref", "numpy", "--kvref-clause", "TIER-01", "--kvref-family", "paged"), "only in tiered"),
    ],
)
def test_a_mistake_is_a_usage_error_of_one_line(run, arguments, message):
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line.startswith("ERROR: ") and message in line


def test_a_factory_with_a_wrong_signature_is_one_error(run, pytester):
    pytester.makepyfile(
        mine="""
        import kvref
        from kvref_conformance.implementations.backends import OnBackend

        class Misnamed(OnBackend):
            def __init__(self):
                super().__init__(kvref.reference)
            def paged(self, blocks, block_size, **others):
                raise AssertionError
        """
    )
    result = run("--kvref", "mine:Misnamed", "--kvref-clause", "PAGED-*")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in (result.stderr.str() + result.stdout.str()).splitlines() if "paged" in line)
    assert "expected a factory that accepts arguments named num_blocks, block_size, num_layers" in line
    assert line.endswith("missing a required argument: 'blocks'")


def test_several_families_are_judged(run):
    result = run("--kvref", "numpy", "--kvref-clause", "B*-01", "--kvref-family", "blocks", "--kvref-family", "buffers")
    result.assert_outcomes(passed=2)
