"""Evaluates a run of mutmut in mutants/: fails if the share of killed mutants is below a minimum."""

import argparse
import json
from collections import Counter
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--least", type=float, default=0.9)
least = parser.parse_args().least

SURVIVED, NOT_RUN = 0, None  # exit codes of the tests, as mutmut stores them
killed: Counter[str] = Counter()
all_of: Counter[str] = Counter()
for path in Path("mutants/kvref").rglob("*.meta"):
    module = path.relative_to("mutants").as_posix().removesuffix(".py.meta")
    for code in json.loads(path.read_text())["exit_code_by_key"].values():
        if code is not NOT_RUN:
            all_of[module] += 1
            killed[module] += code != SURVIVED
for module, count in sorted(all_of.items()):
    print(f"{module:32} {killed[module]:5} of {count:5} killed")
total, dead = sum(all_of.values()), sum(killed.values())
print(f"{'all':32} {dead:5} of {total:5} killed: {dead / max(1, total):.1%}")
raise SystemExit(0 if total and dead / total >= least else 1)
