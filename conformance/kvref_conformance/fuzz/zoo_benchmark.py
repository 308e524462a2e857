"""A benchmark of `kvref search`: how soon it finds the bug of each member of the zoo, without seeds of earlier runs.

`python -m kvref_conformance.fuzz.zoo_benchmark --hours 1`. Each member is searched for a short time. Members
without a failure are searched further from their corpus, three times as long per turn, until the time is over.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvref
import kvref_zoo

FIRST_TURN_SECONDS = 10.0  # seconds per member
TURN_GROWTH = 3  # factor from one turn to the next
START_SECONDS = 4.0  # approximate seconds for starting and ending a search


def search_member(folder: Path, seconds: float, name: str) -> dict[str, Any]:
    """Search a member for one turn with one worker. Returns the broken clauses, the calls, and the seconds of the command."""
    corpus, began = folder / name, time.monotonic()
    command = [str(Path(sys.executable).with_name("kvref")), "search", f"zoo:{name}", "--workers", "1", "--corpus", str(corpus)]
    done = subprocess.run([*command, "--minutes", str(seconds / 60)], cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}: {done.stderr}")
    said = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))
    run = said["runs"][-1]
    return {
        "found": sorted({failure["clause"] for failure in said["failures"]}),
        "by": sorted({failure["unit"][1] for failure in said["failures"]}),
        "calls": run["points"][-1]["calls"],
        "seconds": round(time.monotonic() - began, 1),
    }


def search_members(names: list[str], seconds: float, at_once: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The broken clauses by name of the member, with the calls and seconds of all of its turns."""
    rows: dict[str, dict[str, Any]] = {
        name: {"clause": kvref_zoo.member(name).clause, "found": [], "by": [], "calls": 0, "seconds": 0.0} for name in names
    }
    ends, length = time.monotonic() + seconds, FIRST_TURN_SECONDS
    while left := [name for name, row in rows.items() if not row["found"]]:
        length = min(length, (ends - time.monotonic()) * at_once / len(left) - START_SECONDS)
        if length < 1:
            break
        with ThreadPoolExecutor(at_once) as pool:
            for name, came in zip(left, pool.map(partial(search_member, folder, length), left), strict=True):
                row = rows[name]
                row |= {"found": came["found"], "by": came["by"]}
                row |= {key: round(row[key] + came[key], 1) for key in ("calls", "seconds")}
                print(
                    f"{name}: {', '.join(row['found']) or 'nothing'} ({row['calls']:,} calls, {row['seconds']:.0f} s)", flush=True
                )
        length *= TURN_GROWTH
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description="measure how soon a search finds the bugs of the zoo")
    options.add_argument("--hours", type=float, default=1.0, help="duration for all members together (default 1)")
    options.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="number of parallel searches (default: cores)")
    options.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    options.add_argument("names", nargs="*", metavar="NAME", help="members of the zoo (default: all)")
    asked = options.parse_args()
    names, began = asked.names or kvref_zoo.names(), time.time()
    with TemporaryDirectory() as folder:
        rows = search_members(names, 3600 * asked.hours, asked.at_once, Path(folder))
    found = sum(bool(row["found"]) for row in rows.values())
    print(f"{found} of {len(rows)} found in {(time.time() - began) / 60:.0f} minutes, {asked.at_once} at once")
    if asked.json:
        said = {"kvref": kvref.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime(began)), "hours": asked.hours}
        asked.json.write_text(json.dumps({**said, "at_once": asked.at_once, "members": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
