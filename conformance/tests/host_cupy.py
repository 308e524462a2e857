"""A stand-in for CuPy without a GPU: NumPy's functions, and CUDA kernels compiled for the host, one CUDA thread at a time.

It cannot show device behavior: warps, streams, device memory. The arithmetic of the kernels and the code around them are the real
ones.
"""

import ctypes
import re
import subprocess
from types import ModuleType

import numpy as np

SHIM = """
#include <cmath>
#include <cstring>
#define __global__
#define __device__ static
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim;  // several threads of the host launch kernels at the same time
static unsigned __float_as_uint(float v) { unsigned u; std::memcpy(&u, &v, 4); return u; }
static float __uint_as_float(unsigned u) { float v; std::memcpy(&v, &u, 4); return v; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
"""
LAUNCH = """
extern "C" void launch_{name}(unsigned grid, unsigned block, {parameters}) {{
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) {name}({arguments});
}}
"""
KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
ELEMENT = "bits, mantissa, bias, largest, nan, infinity"
C_TYPES = {np.int64: ctypes.c_longlong, np.int32: ctypes.c_int, np.uint32: ctypes.c_uint, np.float32: ctypes.c_float}


def build(source, folder):
    """Compile a .cu file to a library with a function launch_NAME for each kernel."""
    launches = ""
    for name, parameters in KERNEL.findall(source):
        names = [part.split()[-1].lstrip("*") for part in parameters.split(",")]
        launches += LAUNCH.format(name=name, parameters=parameters, arguments=", ".join(names).replace("ELEMENT", ELEMENT))
    (folder / "kernels.cpp").write_text(SHIM + source + launches)
    compile = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", "kernels.so", "kernels.cpp"]
    subprocess.run(compile, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def module(folder):
    """Return the module that `import cupy` returns."""
    cupy = ModuleType("cupy")
    cupy.__dict__.update({name: value for name, value in vars(np).items() if not name.startswith("__")})
    cupy.asnumpy = np.asarray

    class RawModule:
        def __init__(self, code, options):
            self.library = build(code, folder)

        def get_function(self, name):
            def launch(grid, block, arguments):
                given = [
                    ctypes.c_void_p(each.ctypes.data) if isinstance(each, np.ndarray) else C_TYPES[type(each)](each)
                    for each in arguments
                ]
                self.library[f"launch_{name}"](*grid, *block, *given)

            return launch

    cupy.RawModule = RawModule
    return cupy
