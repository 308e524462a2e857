"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    return {
        **owned("rows", {
            "quantize": of(rows=rows(2, sizes.dim), format=sizes.format),
            "dequantize": of(
                codes=lambda got: got["rows.quantize"][0], scale=lambda got: got["rows.quantize"][1],
                zero=lambda got: got["rows.quantize"][2], width=sizes.dim, format=sizes.format,
            ),
            "mean_absolute_error": of(rows=rows(2, sizes.dim), format=sizes.format),
        }),
    }  # fmt: skip
