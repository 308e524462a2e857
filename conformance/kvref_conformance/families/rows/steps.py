"""Each operation once."""

from kvref_conformance.checking.steps import Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    return {
        **owned("rows", {
            "quantize": of(rows=rows(2, dim), format=format),
            "dequantize": of(
                codes=lambda got: got["rows.quantize"][0], scale=lambda got: got["rows.quantize"][1],
                zero=lambda got: got["rows.quantize"][2], width=dim, format=format,
            ),
            "mean_absolute_error": of(rows=rows(2, dim), format=format),
        }),
    }  # fmt: skip
