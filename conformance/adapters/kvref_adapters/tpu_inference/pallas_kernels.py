"""Adapter of tpu-inference's Pallas kernel that writes vLLM's cache on TPUs, interpreted: `tpu-inference-pallas-store`.

`scatter` is `kv_cache_update`, which copies *slices*: consecutive slots of one page, and as many consecutive tokens. As
tpu-inference does, the adapter makes them from slots, and leaves out the slots of padding. The cache is read by plain indexing,
because tpu-inference reads it in its attention kernels only; invalid slots are therefore not gathered.

Its kernel `ragged_paged_attention` does not run here: Pallas's interpreter lacks bit casts of references, which it uses.
"""

from importlib.metadata import version
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from kvref.errors import SlotOutOfRange
from kvref_adapters._shared.import_stubs import install_stubs
from kvref_adapters.jax.functions import JaxFunctions
from kvref_adapters.jax.pallas_interpreter import interpreted
from kvref_conformance.exceptions import NotOffered

install_stubs(["tpu_inference.utils"], bare=["tpu_inference"])  # without vLLM and TPU tools

from tpu_inference.kernels.ragged_paged_attention.v2.ragged_kv_cache_update import kv_cache_update  # noqa: E402

PAGE = 4  # slots
SLICES = 8  # slices that are copied at a time


class TpuInferenceStore(JaxFunctions):
    name = "tpu-inference-pallas-store"
    version = f"{version('tpu-inference')}, jax {version('jax')}, interpreted"
    language = "pallas"
    project = "tpu-inference"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "head_dim": {"multiple_of": 128}, "threads": False}

    def kernels(self) -> "TpuInferenceStore":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        numbers = np.asarray(slots)
        if store.ndim != 3 or new.shape[1:] != store.shape[1:] or numbers.shape != (len(new),) or numbers.dtype.kind not in "iu":
            raise NotOffered("malformed tokens or slots: tpu-inference makes slices from its own block tables")
        if {store.dtype, new.dtype} != {jnp.dtype("float32")} or store.shape[2] % 128 or len(store) % PAGE:
            raise NotOffered("other dtypes than float32, heads of other sizes than 128, and stores without whole pages")
        tokens = np.flatnonzero(numbers >= 0)
        if (numbers >= len(store)).any():
            raise SlotOutOfRange(f"expected slots below {len(store)}, got {numbers.max()}")
        if not len(tokens):
            return store
        slices = slices_of(numbers[tokens])
        padded = np.pad(slices, ((0, 0), (0, -slices.shape[1] % SLICES))).astype(np.int32)
        with interpreted():
            count = jnp.array([slices.shape[1]], jnp.int32)
            return kv_cache_update(
                new[tokens], jnp.array(padded), jnp.array(store), count, page_size=PAGE, num_slices_per_block=SLICES
            )

    def gather(self, store: Any, slots: Any) -> Any:
        numbers = np.asarray(slots)
        numbers = numbers.astype(np.int64) if numbers.dtype.kind in "iu" else numbers
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or ((numbers < 0) | (numbers >= len(store))).any():
            raise NotOffered("gathering invalid slots: tpu-inference has no kernel that gathers")
        return store[numbers]


def slices_of(slots: Any) -> Any:
    """Return slices [3, n] for tokens with these slots: the first slot, the first token, and the number of tokens of each."""
    follows = (np.diff(slots) == 1) & (slots[1:] % PAGE != 0)
    first = np.flatnonzero(np.append(True, ~follows))
    return np.stack([slots[first], first, np.diff(np.append(first, len(slots)))])
