"""Expected failures: the file, the verdicts, and updating it."""

import pytest

from kvref_conformance.runner.expected_failures import ExpectedFailuresError, read_expected_failures, update_expected_failures


def test_the_file_has_clauses_reasons_and_comments(tmp_path):
    path = tmp_path / "xfails.txt"
    path.write_text("# a comment\n\nPAGED-07  one block is kept  # for now\nblock-05\n")
    assert read_expected_failures(path) == {"PAGED-07": "one block is kept", "BLOCK-05": ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PAGED-7\n", r"xfails.txt:1: no clause 'PAGED-7': did you mean PAGED-07\?"),
        ("# x\nPAGED-07\nPAGED-07 again\n", "xfails.txt:3: PAGED-07 is listed twice"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path, text, message):
    path = tmp_path / "xfails.txt"
    path.write_text(text)
    with pytest.raises(ExpectedFailuresError, match=message):
        read_expected_failures(path)


def test_updating_keeps_comments_reasons_and_what_was_not_judged(tmp_path):
    path = tmp_path / "xfails.txt"
    path.write_text("# ours\nPAGED-07  a reason\nBLOCK-05\nTIER-05  not judged now\nTIER-06\nKERN-06  --slow\nLAW-01  passes\n")
    verdicts = {"PAGED-07": "xfailed", "BLOCK-05": "xpassed", "POOL-01": "failed", "POOL-02": "passed", "LAW-01": "passed"}
    update_expected_failures(path, verdicts | {"TIER-06": "not offered", "KERN-06": "not run", "TIER-07": "not offered"})
    assert path.read_text() == "# ours\nPAGED-07  a reason\nTIER-05  not judged now\nTIER-06\nKERN-06  --slow\nPOOL-01\n"


def test_updating_makes_the_file(tmp_path):
    path = tmp_path / "xfails.txt"
    update_expected_failures(path, {"PAGED-07": "failed"})
    assert path.read_text() == "PAGED-07\n"
