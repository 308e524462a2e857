"""Tables of API subsets: how many clauses can be judged with a few operations, as `kvref check NAME --list` reports."""

from kvref_conformance.families import all_families
from kvref_conformance.runner.capabilities import Gain, OperationStatus, preview_coverage
from kvref_conformance.runner.check_runner import select_checks
from kvref_conformance.runner.restricted import RestrictedImplementation
from kvref_conformance.testlib.sample_calls import Sizes

# Operations that typical third-party caches have, or the smallest subset with which any clause can be judged.
SUBSETS = {
    "contiguous": ("append read", "append read seq_len reset"),
    "blocks": ("allocate free utilization", "allocate free num_free num_blocks"),
    "paged": (
        "create drop write gather",
        "create drop ensure_capacity write read length utilization",
        "create drop write gather length block_table num_free_blocks",
        "create drop append gather",
    ),
    "quantized": ("append read_token length", "append_step read_head length memory_bytes fp32_bytes compression_ratio"),
    "channels": ("append read length", "append attend length"),
    "tiered": ("append read clear", "append read clear stats"),
    "pooled": ("append read clear", "append read clear stats"),
    "windowed": ("append attend length", "step read length"),
    "grouped": ("create drop step read length",),
    "latent": ("append attend read length",),
    "recurrent": (
        "create drop append length read_inputs read_matrix",
        "create drop append length read_inputs read_matrix truncate checkpoint fork num_free_blocks",
    ),
    "pruned": ("append prune read", "append prune attend read positions length"),
    "sparse": ("create append read select", "create append read read_index select attend drop fork length"),
    "ragged": ("append read filter", "append read filter length extend trim attend"),
    "cross": (
        "write_source read_source attend_source append read filter",
        "write_source read_source attend_source append read filter length trim clear",
    ),
    "compressed": (
        "create append read_rows read_window read_state",
        "create append step drop fork truncate length read_rows read_window",
    ),
    "sharded": ("append read attend length", "append read_rank heads positions"),
    "tree": ("draft positions ancestors create append", "create append draft attend accept reject read num_free_blocks"),
    "transfer": (
        "create append gather drop begin arrive commit abort num_free_blocks",
        "create append gather drop truncate num_free_blocks export send release",
    ),
}
MAX_GAINS = 3  # the number of further operations shown, those with the largest gain


def api_subsets_table() -> str:
    """A table of SUBSETS: how many clauses are judged with each subset, and how many checks each further operation would add."""
    lines = ["| family | operations | clauses judged | further operations, with the checks that each adds |", "|---|---|---|---|"]
    for family, subsets in SUBSETS.items():
        for words in subsets:
            operations = [f"{family}.{name}" for name in words.split()]
            restricted = RestrictedImplementation(operations=operations, families=[family])
            missing = [op for op in _operations(family) if op not in operations]
            found = preview_coverage(restricted, {family: OperationStatus(operations, missing)}, select_checks(family=family))
            judged = [reach for reach in found.reaches if reach.judged]
            derived = sum(bool(reach.through) for reach in judged)
            share = f"{len(judged)} of {len(found.reaches)}" + (f" ({derived} by derived operations)" if derived else "")
            gains = "<br>".join(map(_format_gain, found.gains[:MAX_GAINS]))
            lines.append(f"| {family} | {_format_names(words.split())} | {share} | {gains} |")
    return "\n".join(lines) + "\n"


def derived_operations_table() -> str:
    """A table of the operations that the judge derives from others if they are missing."""
    lines = ["| derived operation | derived from | clause that defines them as equal |", "|---|---|---|"]
    for family in all_families().values():
        module = family.part("derived_operations")
        for way in module.DERIVED if module else ():
            lines.append(f"| `{family.name}.{way.name}` | {_format_names(way.uses)} | {way.clause} |")
    return "\n".join(lines) + "\n"


def _operations(family: str) -> list[str]:
    return list(all_families()[family].interface.sample_calls(Sizes(heads=2, dim=5, layers=2, format="int8")))


def _format_gain(gain: Gain) -> str:
    return f"`{gain.operation.partition('.')[2]}`: {gain.checks}"


def _format_names(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
