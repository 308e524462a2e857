import ctypes

import numpy as np
import xllamacpp.xllamacpp


def quantize(rows):  # void quantize_row_iq4_nl_ref(const float * x, block_iq4_nl * y, int64_t k)
    blocks = np.zeros((rows.size // 32, 18), np.uint8)
    given, written = (array.ctypes.data_as(ctypes.c_void_p) for array in (rows, blocks))
    ctypes.CDLL(xllamacpp.xllamacpp.__file__).quantize_row_iq4_nl_ref(given, written, ctypes.c_int64(rows.size))
    return blocks


for last in (0, 1, 2):  # the last number of the block before the 32 zeros
    rows = np.stack([np.linspace(1, last, 32), np.zeros(32)]).astype(np.float32)
    print("the block of zeros:", quantize(rows)[1].tolist()[:6])
