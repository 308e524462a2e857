"""The same verdicts through pytest itself."""

import pytest


@pytest.fixture
def run(pytester):
    def run(*arguments):
        quick = ("-p", "no:cacheprovider", "--kvref-examples", "5")
        return pytester.runpytest_subprocess("--pyargs", "kvref_conformance", *quick, *arguments)

    return run


def test_a_clause_is_a_test_with_its_id(run):
    result = run("--kvref", "numpy", "-k", "PAGED-07", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*checks/paged.py::PAGED-07?numpy? PASSED*"])


def test_every_clause_is_collected_once_for_each_implementation(run):
    result = run("--kvref", "numpy", "--kvref", "reference", "--collect-only", "-q", "--kvref-clause", "B*")
    names = [line.rpartition("::")[2] for line in result.outlines if "::" in line]
    want = [
        f"{clause}-0{n}[{name}]"
        for name in ("numpy", "reference")
        for clause, last in (("BLOCK", 6), ("BUF", 9))
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
    result = run("--kvref", "ml_dtypes", "--kvref-clause", "PAGED-07", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not offered: family paged*"])


def test_an_unknown_name_is_a_usage_error(run):
    result = run("--kvref", "nump")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'numpy'" in result.stderr.str() + result.stdout.str()


def test_workers_carry_the_same_verdicts(run):
    result = run("--kvref", "numpy", "--kvref-clause", "BLOCK-*", "-n", "2")
    result.assert_outcomes(passed=6)
