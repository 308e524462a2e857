"""SGLang's Triton kernels in Triton's interpreter. Import this module before all other modules that import SGLang.

SGLang runs its own kernels only if its platform supports Triton and if the server's attention backend is `triton`; both are set.
"""

from importlib.metadata import version

import kvref_adapters._shared.triton_interpreter  # noqa: F401 - before SGLang
from kvref_adapters.sglang import modules

modules.ABSENT = tuple(name for name in modules.ABSENT if name != "triton")
modules.ATTENTION_BACKEND = "triton"
PLATFORM = modules.sglang_module("platforms").current_platform
type(PLATFORM).capabilities = type(PLATFORM.capabilities)(supports_triton=True)
modules.sglang_module("runtime_context").get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
VERSION = f"{modules.VERSION}, triton {version('triton')}, interpreted"
