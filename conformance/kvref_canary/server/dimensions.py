"""The integer sizes of a canary: the judge requests canaries by these alone."""

from dataclasses import replace

from kvref.canary import Canary, sized
from kvref.canary.hybrid import HYBRIDS, AnyCanary, HybridCanary
from kvref.errors import ConfigError
from kvref_conformance.exceptions import CannotRun

# The options of `kvref canary make` that the integer sizes do not determine.
OPTIONS = {"offsets": "--offsets", "windows": "--windows", "theta": "--theta", "num_pairs": "--pairs"}


def sizes_of(canary: AnyCanary) -> dict[str, int]:
    """Return the arguments with which `engine_canary` makes this canary; other sizes have no effect.

    The MLP size is ignored, for its weights are zeros. If no arguments make it, raises CannotRun with the options that would make
    such a canary.
    """
    if isinstance(canary, HybridCanary):
        return {"recurrent": HYBRIDS.index(canary.architecture) + 1, "recalls": 0, "window": 0, "context": canary.context}
    plain = replace(canary, intermediate_size=Canary.intermediate_size)
    window = next((each for each in canary.windows if each is not None), 0)
    numbers = {
        "num_layers": canary.num_layers, "num_kv_heads": canary.num_kv_heads, "num_query_heads": canary.num_query_heads,
        "head_dim": canary.head_dim, "context": canary.context, "period": max(canary.period, canary.num_layers + 1),
        "window": window, "recalls": int(canary.recalls), "recurrent": 0,
    }  # fmt: skip
    try:
        made = sized(**numbers)
    except ConfigError as error:
        raise CannotRun(
            f"--canary: the integer sizes of this canary, by which the judge requests it, are invalid: {error}"
        ) from None
    if made != plain:
        raise CannotRun(
            f"--canary: expected one made with {_difference(made, plain)}, as the judge requests it, "
            f"got {_difference(plain, made)}"
        )
    return numbers


def with_shorter_context(canary: Canary, context: int) -> Canary | None:
    """Return the same model with a shorter context, or None if a canary of that context has other weights."""
    try:
        shorter = replace(canary, context=context)
        same = all(shorter.pairs(layer) == canary.pairs(layer) for layer in range(canary.num_layers))
    except ConfigError:
        return None
    return shorter if same else None


def _difference(canary: Canary, other: Canary) -> str:
    """Return the options in which two canaries differ, with the values of the first."""
    differ = [name for name in OPTIONS if getattr(canary, name) != getattr(other, name)]
    return " ".join(f"{OPTIONS[name]} {_format_value(getattr(canary, name))}" for name in differ)


def _format_value(value: float | tuple[int | None, ...] | None) -> str:
    if value is None:
        return "(default)"
    return ",".join(str(each or "none") for each in value) if isinstance(value, tuple) else f"{value:g}"
