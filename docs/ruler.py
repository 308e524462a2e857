"""Measure how many tokens a canary says right in llama.cpp's cache formats: python docs/ruler.py DATE, with xllamacpp installed.

Writes docs/results/ruler.json. margin: in nats, what is left where every rounding goes the wrong way (kvref.canary); where it is
negative a wrong token would be no bug, and where it is positive a wrong token would be one.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import kvref
from kvref.canary import Canary
from kvref_conformance.engines.ruler import measured
from kvref_conformance.implementations.engines.llama_cpp import LlamaCpp

INTO = Path(__file__).parent / "results" / "ruler.json"
PROMPTS = 2
CANARIES = {
    "the fastest pairs": Canary(offsets=(200, 300)),
    "all 32 pairs": Canary(offsets=(200, 300), num_pairs=32),
    "all 32 pairs, theta 30,000": Canary(offsets=(200, 300), num_pairs=32, theta=30_000.0),
}
HALF = 2.0**-11  # float16's roundoff, in which llama.cpp computes
# |q e| / |q k| at most, as in kvref.canary.shape. A q type stores 32 numbers as steps of the largest: 1/127; of two offsets and
# 31 or 15 steps from least to largest; or 1/16 or 1/8, where the other end is cut off by a whole step. Queries are made q8 too.
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


class InFormat(LlamaCpp):
    def __init__(self, cache: str) -> None:
        self.options = {"type_k": cache, "type_v": cache}


def row(title: str, canary: Canary, cache: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        engine = InFormat(cache).loaded(canary, Path(folder), canary.context)

    def complete(prompt, count):
        session = engine.open()
        engine.extend(session, prompt)
        said = engine.generate(session, count)
        engine.close(session)
        return said

    right, of = measured(canary, complete, PROMPTS)
    margin = min(canary.margin(layer, KEY_ERRORS[cache], HALF) for layer in range(canary.num_layers))
    print(f"{title:20} {cache:6} {right} of {of}, margin {margin:.1f}", file=sys.stderr)
    return {"engine": "llama.cpp", "canary": title, "cache": cache, "right": right, "of": of, "margin": round(margin, 1)}


def main(date: str) -> None:
    rows = [row(title, canary, cache) for title, canary in CANARIES.items() for cache in KEY_ERRORS]
    gaps = {title: round(canary.gap(0), 4) for title, canary in CANARIES.items()}
    document = {"kvref": kvref.__version__, "date": date, "versions": {"llama.cpp": LlamaCpp.version}, "gaps": gaps, "rows": rows}
    INTO.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
