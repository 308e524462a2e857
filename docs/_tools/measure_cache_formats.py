"""Precision probe of llama.cpp: measure how many tokens of a canary are right in each of its cache formats.

`python docs/_tools/measure_cache_formats.py DATE`, with xllamacpp and kvref-adapters installed, writes `docs/results/ruler.json`.
margin: the difference in nats that remains between the attention scores of the right position and of all others if every rounding
error has the worst sign (`Canary.margin`). If it is positive, a wrong token is a bug; if it is negative, rounding alone can
explain a wrong token.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import kvref
from kvref.canary import Canary
from kvref_adapters.llama_cpp.engine import LlamaCpp
from kvref_canary.diagnosis.precision_probe import measure_precision

RESULTS = Path(__file__).parents[1] / "results/ruler.json"
PROMPTS = 2
CANARIES = {
    "the fastest pairs": Canary(offsets=(200, 300)),
    "all 32 pairs": Canary(offsets=(200, 300), num_pairs=32),
    "all 32 pairs, theta 30,000": Canary(offsets=(200, 300), num_pairs=32, theta=30_000.0),
}
HALF = 2.0**-11  # unit roundoff of float16, in which llama.cpp computes
# The maximum of |q e| / |q k| for key errors e, as in kvref.canary.dimensions. A q type stores 32 numbers with one step size.
# q8_0: 1/127 of the largest magnitude. q5_1, q4_1: 1/31, 1/15 of the distance between the smallest and the largest number.
# q5_0, q4_0: 1/16, 1/8 of the largest magnitude, where the other end of the range is cut off by a whole step. llama.cpp quantizes
# queries as q8, too.
QUERY = math.sqrt(2) / 254
KEY_ERRORS = {
    "f16": HALF,
    "bf16": 2.0**-8,
    "q8_0": math.sqrt(2) / 254 + QUERY,
    "q5_1": math.sqrt(2) / 31 + QUERY,
    "q5_0": math.sqrt(2) / 16 + QUERY,
    "q4_1": math.sqrt(2) / 15 + QUERY,
    "q4_0": math.sqrt(2) / 8 + QUERY,
}


class LlamaCppInFormat(LlamaCpp):
    def __init__(self, cache: str) -> None:
        self.options = {"type_k": cache, "type_v": cache}


def measure(title: str, canary: Canary, cache: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        engine = LlamaCppInFormat(cache).loaded(canary, Path(folder), canary.context)

    def complete(prompt, count):
        session = engine.open()
        engine.extend(session, prompt)
        generated = engine.generate(session, count)
        engine.close(session)
        return generated

    right, of = measure_precision(canary, complete, PROMPTS)
    margin = min(canary.margin(layer, KEY_ERRORS[cache], HALF) for layer in range(canary.num_layers))
    print(f"{title:20} {cache:6} {right} of {of}, margin {margin:.1f}", file=sys.stderr)
    return {"engine": "llama.cpp", "canary": title, "cache": cache, "right": right, "of": of, "margin": round(margin, 1)}


def main(date: str) -> None:
    rows = [measure(title, canary, cache) for title, canary in CANARIES.items() for cache in KEY_ERRORS]
    gaps = {title: round(canary.gap(0), 4) for title, canary in CANARIES.items()}
    document = {"kvref": kvref.__version__, "date": date, "versions": {"llama.cpp": LlamaCpp.version}, "gaps": gaps, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
