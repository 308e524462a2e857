"""Whether a recorded request is within the limits of another implementation, on which it is to be replayed."""

from collections import Counter
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import CallRequest
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.oracle.formats import STATIC_FORMATS, describe_formats
from kvref_conformance.oracle.model_runner import is_valid_config

SCALE_ARGUMENTS = ("given_scale", "key_scale", "value_scale")  # the arguments that only formats of FMT-STATIC need


def require_float32(subject: Subject) -> None:
    """Raise NotOffered if the subject does not accept float32: replies to float32 arguments are not valid for narrower floats."""
    if "float32" not in (taken := subject.limits.dtypes(subject.family)):
        raise NotOffered(f"float32 arrays, where its limits say {' or '.join(taken)}")


def require_within_limits(subject: Subject, request: CallRequest, args: dict[str, Any]) -> None:
    """Raise NotOffered if a request exceeds the limits: by its sizes, by one sequence too many, or by an unsupported scale.

    Sizes that are invalid for every implementation do not raise here: they are replayed, because the reply must be an error.
    """
    if any(args.get(name) is not None for name in SCALE_ARGUMENTS) and not {*STATIC_FORMATS} & {*subject.implementation.formats}:
        raise NotOffered(describe_formats(STATIC_FORMATS))
    family, limits = all_families().get(request.family), subject.limits
    if not limits.declared or family is None:
        return
    if request.name == "new":
        if (
            args.keys() >= family.small.keys()
            and is_valid_config(family, args)
            and (beyond := limits.exceeded_sizes(family.name, args))
        ):
            raise NotOffered(beyond)
    elif family.gives.get(request.name) == "sequence":
        most = limits.limit(family.name, "sequences").most
        returned = Counter(each.request.name for each in subject.call_trace if each.reply and not each.reply.error)
        begun = sum(count for name, count in returned.items() if family.gives.get(name) == "sequence")
        if most is not None and begun - returned["drop"] >= most:
            raise NotOffered(f"sequences {most + 1}, where its limits say at most {most}")
    elif not family.small:  # the family has no objects with sizes; only its arguments have sizes
        arrays = [each for each in args.values() if isinstance(each, np.ndarray) and each.dtype.kind == "f" and each.ndim > 1]
        for array in arrays:
            sizes = {"width": array.shape[-1]} if family.name == "rows" else {"head_dim": array.shape[-1]}
            if family.name == "attention" and array is not args.get("query") and array.ndim == 3:
                sizes["num_kv_heads"] = array.shape[1]
            for name, size in sizes.items():
                if not limits.limit(family.name, name).allows(size):
                    raise NotOffered(f"{name} {size}, where its limits say {limits.limit(family.name, name)}")
