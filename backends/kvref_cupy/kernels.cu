// The CUDA kernels of kvref_cupy: quantize and dequantize rows, encode and decode single numbers, bit-identical to kvref.formats.
//
// Arithmetic uses the __f*_rn intrinsics, each of which rounds once, to nearest. With plain operators the compiler is permitted
// to fuse a product and a sum (FMT-AFF-04), and to divide by multiplying with a reciprocal. A warp processes a row, so that
// adjacent threads read adjacent numbers.
//
// Compiled for a host (without __CUDACC__) a "warp" is one thread. The tests do so on machines without a GPU.

#ifdef __CUDACC__
#define WARP 32
__device__ float warp_max(float v) {
    for (int d = WARP / 2; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}
__device__ bool warp_any(bool v) { return __any_sync(0xffffffffu, v); }
#else
#define WARP 1
static float warp_max(float v) { return v; }
static bool warp_any(bool v) { return v; }
#endif

#define BELOW_HALF 0.49999997f  // the float below one half: trunc(y + this) rounds halves away from zero, for y >= 0
#define LARGEST_FLOAT 3.402823466e+38f

// A float type, as kvref.formats.SmallFloat; infinity is 0 if the type has none.
struct Element {
    int bits, mantissa, bias;
    unsigned largest, nan, infinity;
};
#define ELEMENT int bits, int mantissa, int bias, unsigned largest, unsigned nan, unsigned infinity
#define ELEMENT_GIVEN {bits, mantissa, bias, largest, nan, infinity}

__device__ unsigned encode(float x, Element f) {
    unsigned pattern = __float_as_uint(x), magnitude = pattern & 0x7fffffffu;
    unsigned sign = pattern >> 31 << (f.bits - 1);
    if (magnitude > 0x7f800000u || (magnitude == 0x7f800000u && !f.infinity)) return sign | f.nan;
    // x = significand * 2^(exponent - 23), both integers.
    unsigned significand = magnitude & 0x7fffffu;
    int exponent = -126;
    if (magnitude >> 23) {
        significand |= 0x800000u;
        exponent = (int)(magnitude >> 23) - 127;
    }
    int field = exponent + f.bias < 1 ? 1 : exponent + f.bias;  // subnormal numbers have the unit of field 1
    int dropped = (field - f.bias - f.mantissa) - (exponent - 23);  // bits below the unit
    unsigned units = 0;
    if (dropped < 26) {  // otherwise x is less than half a unit
        unsigned rest = significand & ((1u << dropped) - 1), half = 1u << (dropped - 1);
        units = significand >> dropped;
        units += rest > half || (rest == half && (units & 1));  // ties to even; a carry increments the exponent
    }
    unsigned code = ((unsigned)(field - 1) << f.mantissa) + units;
    if (code > f.largest) code = f.infinity ? f.infinity : f.largest;
    return sign | code;
}

__device__ float decode(unsigned code, Element f) {
    unsigned magnitude = code & ((1u << (f.bits - 1)) - 1);
    bool negative = code >> (f.bits - 1);
    if (magnitude > f.largest)
        return __uint_as_float((f.infinity && magnitude == f.infinity ? 0x7f800000u : 0x7fc00000u) | (unsigned)negative << 31);
    int field = (int)(magnitude >> f.mantissa);
    unsigned units = magnitude & ((1u << f.mantissa) - 1);
    if (field) units |= 1u << f.mantissa;
    float value = ldexpf((float)units, (field ? field : 1) - f.bias - f.mantissa);
    return negative ? -value : value;
}

__device__ long long row_of_this_warp() { return ((long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP; }

// rows [n, width] -> codes [n, width], scale [n]. bits is 0 for INT8. refused is set to 1 if a row is not finite, or would not
// read back as finite numbers (FMT-LEVEL-05).
extern "C" __global__ void quantize_symmetric(const float* rows, unsigned char* codes, float* scale, int* refused, long long n,
                                              int width, float limit, float least_scale, ELEMENT) {
    Element f = ELEMENT_GIVEN;
    long long row = row_of_this_warp();
    int lane = threadIdx.x % WARP;
    if (row >= n) return;
    rows += row * width;
    codes += row * width;
    float most = 0;
    bool odd = false;
    for (int i = lane; i < width; i += WARP) {
        float magnitude = fabsf(rows[i]);
        odd = odd || !(magnitude <= LARGEST_FLOAT);  // not: magnitude > LARGEST_FLOAT, which is false for NaN
        most = fmaxf(most, magnitude);
    }
    float s = fmaxf(__fdiv_rn(warp_max(most), limit), least_scale);
    if (warp_any(odd) || __fmul_rn(s, limit) > LARGEST_FLOAT) {
        *refused = 1;
        return;
    }
    if (lane == 0) scale[row] = s;
    for (int i = lane; i < width; i += WARP) {
        float quotient = __fdiv_rn(rows[i], s);
        if (f.bits == 0)
            codes[i] = (unsigned char)(signed char)(int)__fadd_rn(quotient, copysignf(BELOW_HALF, quotient));
        else
            codes[i] = (unsigned char)encode(fminf(fmaxf(quotient, -limit), limit), f);
    }
}

// rows [n, width] -> codes [n, ceil(width * bits / 8)], scale [n], zero [n].
extern "C" __global__ void quantize_affine(const float* rows, unsigned char* codes, float* scale, float* zero, int* refused,
                                           long long n, int width, int bits, float least_scale) {
    long long row = row_of_this_warp();
    int lane = threadIdx.x % WARP, per_byte = 8 / bits, code_width = (width + per_byte - 1) / per_byte;
    if (row >= n) return;
    rows += row * width;
    codes += row * code_width;
    float least = rows[0], most = rows[0];
    bool odd = false;
    for (int i = lane; i < width; i += WARP) {
        odd = odd || !(fabsf(rows[i]) <= LARGEST_FLOAT);
        least = fminf(least, rows[i]);
        most = fmaxf(most, rows[i]);
    }
    least = -warp_max(-least);
    most = warp_max(most);
    float spread = __fsub_rn(most, least), steps = (float)((1 << bits) - 1);
    float s = fmaxf(__fdiv_rn(spread, steps), least_scale);
    if (warp_any(odd) || __fadd_rn(__fmul_rn(s, steps), least) > LARGEST_FLOAT) {
        *refused = 1;
        return;
    }
    if (lane == 0) {
        scale[row] = s;
        zero[row] = least;
    }
    for (int i = lane; i < code_width; i += WARP) {
        unsigned byte = 0;
        for (int part = 0; part < per_byte && i * per_byte + part < width; part++) {
            float quotient = __fdiv_rn(__fsub_rn(rows[i * per_byte + part], least), s);
            byte |= (unsigned)fminf(__fadd_rn(quotient, BELOW_HALF), steps) << (part * bits);  // the even index below (FMT-AFF-06)
        }
        codes[i] = (unsigned char)byte;
    }
}

// codes, scale [n], zero [n] -> out [n, width]. affine_bits: 8, 4, or 0 for a symmetric format, which has no zero.
extern "C" __global__ void dequantize(const unsigned char* codes, const float* scale, const float* zero, float* out, long long n,
                                      int width, int affine_bits, ELEMENT) {
    Element f = ELEMENT_GIVEN;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * width) return;
    long long row = i / width;
    int column = (int)(i % width);
    float value;
    if (affine_bits == 4)
        value = (float)(codes[row * ((width + 1) / 2) + column / 2] >> (column % 2 * 4) & 15);
    else if (affine_bits == 8)
        value = (float)codes[i];
    else if (f.bits == 0)
        value = (float)(signed char)codes[i];
    else
        value = decode(codes[i], f);
    value = __fmul_rn(value, scale[row]);
    out[i] = affine_bits ? __fadd_rn(value, zero[row]) : value;
}

extern "C" __global__ void encode_values(const float* values, void* codes, long long n, ELEMENT) {
    Element f = ELEMENT_GIVEN;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (f.bits == 8)
        ((unsigned char*)codes)[i] = (unsigned char)encode(values[i], f);
    else
        ((unsigned short*)codes)[i] = (unsigned short)encode(values[i], f);
}

extern "C" __global__ void decode_values(const void* codes, float* values, long long n, ELEMENT) {
    Element f = ELEMENT_GIVEN;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    values[i] = decode(f.bits == 8 ? ((const unsigned char*)codes)[i] : ((const unsigned short*)codes)[i], f);
}

// Formats of groups: a warp processes a group. Codes of `size` bits are packed low bits first (FMT-SMALL-01). The thread that writes
// a byte computes each code that has bits in it.

#define LEAST_INVERTIBLE 5.877471754111438e-39f  // 2^-127

#define FLOAT16 {16, 10, 15, 0x7bff, 0x7e00, 0x7c00}
#define E4M3FN {8, 3, 7, 0x7e, 0x7f, 0}

// Scales and zeros of groups are float32 if bits is 0, otherwise of the 16-bit type.
__device__ float held(float value, Element f) { return f.bits ? decode(encode(value, f), f) : value; }
__device__ void store(void* to, long long at, float value, Element f) {
    if (f.bits)
        ((unsigned short*)to)[at] = (unsigned short)encode(value, f);
    else
        ((float*)to)[at] = value;
}
__device__ float load(const void* from, long long at, Element f) {
    return f.bits ? decode(((const unsigned short*)from)[at], f) : ((const float*)from)[at];
}

__device__ unsigned unpacked(const unsigned char* codes, int i, int size) {
    int bit = i * size;
    unsigned two = codes[bit / 8];
    if (bit % 8 + size > 8) two |= (unsigned)codes[bit / 8 + 1] << 8;
    return two >> (bit % 8) & ((1u << size) - 1);
}

// Byte `at` of packed codes, where code(i) returns the code of number i.
template <typename Code>
__device__ unsigned char packed(int at, int size, Code code) {
    unsigned byte = 0;
    for (int i = at * 8 / size; i <= (at * 8 + 7) / size; i++) {
        int shift = i * size - at * 8;
        byte |= shift < 0 ? code(i) >> -shift : code(i) << shift;
    }
    return (unsigned char)byte;
}

// x [n, group] -> codes [n, group * size / 8], scale [n] and, if affine, zero [n], in the given type. least: the least scale.
extern "C" __global__ void quantize_groups(const float* rows, unsigned char* codes, void* scale, void* zero, int* refused,
                                           long long n, int group, int size, int affine, float least_scale, ELEMENT) {
    Element f = ELEMENT_GIVEN;
    long long row = row_of_this_warp();
    int lane = threadIdx.x % WARP, code_width = group * size / 8;
    if (row >= n) return;
    const float* x = rows + row * group;
    float least = x[0], most = x[0], reach = 0, z = 0, top = (float)((1 << (affine ? size : size - 1)) - 1);
    bool odd = false;
    for (int i = lane; i < group; i += WARP) {
        odd = odd || !(fabsf(x[i]) <= LARGEST_FLOAT);
        least = fminf(least, x[i]);
        most = fmaxf(most, x[i]);
        reach = fmaxf(reach, fabsf(x[i]));
    }
    reach = warp_max(reach);
    if (affine) {
        z = held(__fadd_rn(-warp_max(-least), 0.0f), f);
        reach = __fsub_rn(warp_max(most), z);
    }
    float s = held(fmaxf(__fdiv_rn(reach, top), least_scale), f);
    if (warp_any(odd) || !(fabsf(__fadd_rn(__fmul_rn(s, top), z)) <= LARGEST_FLOAT)) {
        *refused = 1;
        return;
    }
    if (lane == 0) {
        store(scale, row, s, f);
        if (affine) store(zero, row, z, f);
    }
    auto code = [&](int i) {
        float quotient = __fdiv_rn(__fsub_rn(x[i], z), s);
        if (affine) return (unsigned)fminf(fmaxf(__fadd_rn(quotient, BELOW_HALF), 0.0f), top);
        int magnitude = (int)fminf(__fadd_rn(fabsf(quotient), BELOW_HALF), top);
        return (unsigned)(quotient < 0 ? -magnitude : magnitude) & ((1u << size) - 1);
    };
    for (int i = lane; i < code_width; i += WARP) codes[row * code_width + i] = packed(i, size, code);
}

extern "C" __global__ void dequantize_groups(const unsigned char* codes, const void* scale, const void* zero, float* out,
                                             long long n, int group, int size, int affine, ELEMENT) {
    Element f = ELEMENT_GIVEN;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = i / group;
    if (row >= n) return;
    int code = (int)unpacked(codes + row * (group * size / 8), (int)(i % group), size);
    if (!affine && code >> (size - 1)) code -= 1 << size;  // two's complement
    float product = __fmul_rn((float)code, load(scale, row, f));
    out[i] = affine ? __fadd_rn(product, load(zero, row, f)) : product;
}

__device__ float power(int code) { return __uint_as_float(code ? (unsigned)code << 23 : 1u << 22); }  // 2^(code - 127)

// Elements of `size` bits; if bits is 0, integers in units of 1/64. nvfp4: scales are E4M3FN, not E8M0. limit: largest element.
extern "C" __global__ void quantize_microscaled(const float* rows, unsigned char* codes, unsigned char* scale, int* refused,
                                                long long n, int group, int size, int nvfp4, float limit, ELEMENT) {
    Element f = ELEMENT_GIVEN, of_scales = E4M3FN;
    long long row = row_of_this_warp();
    int lane = threadIdx.x % WARP, code_width = group * size / 8;
    if (row >= n) return;
    const float* x = rows + row * group;
    float peak = 0;
    bool odd = false;
    for (int i = lane; i < group; i += WARP) {
        odd = odd || !(fabsf(x[i]) <= LARGEST_FLOAT);
        peak = fmaxf(peak, fabsf(x[i]));
    }
    peak = warp_max(peak);
    if (warp_any(odd)) {
        *refused = 1;
        return;
    }
    int exponent = (int)(__float_as_uint(peak) >> 23) - ((int)(__float_as_uint(limit) >> 23) - 127);
    exponent = exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
    unsigned s = nvfp4 ? encode(fminf(fmaxf(__fdiv_rn(peak, limit), 0.015625f), 448.0f), of_scales) : (unsigned)exponent;
    if (lane == 0) scale[row] = (unsigned char)s;
    float divisor = nvfp4 ? decode(s, of_scales) : 1.0f, factor = nvfp4 ? 1.0f : power(254 - exponent);
    auto code = [&](int i) {
        float quotient = nvfp4 ? __fdiv_rn(x[i], divisor) : __fmul_rn(x[i], factor);
        quotient = fminf(fmaxf(quotient, -limit), limit);
        return f.bits ? encode(quotient, f) : (unsigned)(int)rintf(__fmul_rn(quotient, 64.0f)) & 255u;
    };
    for (int i = lane; i < code_width; i += WARP) codes[row * code_width + i] = packed(i, size, code);
}

extern "C" __global__ void dequantize_microscaled(const unsigned char* codes, const unsigned char* scale, float* out, long long n,
                                                  int group, int size, int nvfp4, ELEMENT) {
    Element f = ELEMENT_GIVEN, of_scales = E4M3FN;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = i / group;
    if (row >= n) return;
    unsigned code = unpacked(codes + row * (group * size / 8), (int)(i % group), size);
    float element = f.bits ? decode(code, f) : __fmul_rn((float)(signed char)code, 0.015625f);
    float s = nvfp4 ? decode(scale[row], of_scales) : scale[row] == 255 ? __uint_as_float(0x7fc00000u) : power(scale[row]);
    out[i] = __fmul_rn(element, s);
}

// Blocks of ggml: float16 scale, if affine the least value, fifth bits, codes. table: the numbers of IQ4_NL, used if tabled.
#define BLOCK_GIVEN \
    int head = affine ? 4 : 2, fifth = size == 5 ? 4 : 0, half = size == 8 ? 32 : 16, block_width = head + fifth + half

extern "C" __global__ void quantize_ggml(const float* rows, unsigned char* codes, const float* table, int* refused, long long n,
                                         int size, int affine, int tabled) {
    Element f = FLOAT16;
    BLOCK_GIVEN;
    long long row = row_of_this_warp();
    int lane = threadIdx.x % WARP;
    if (row >= n) return;
    const float* x = rows + row * 32;
    unsigned char* block = codes + row * block_width;
    float largest = 0, low = x[0], high = x[0], first = 32;
    bool odd = false;
    for (int i = lane; i < 32; i += WARP) {
        odd = odd || !(fabsf(x[i]) <= LARGEST_FLOAT);
        largest = fmaxf(largest, fabsf(x[i]));
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    largest = warp_max(largest);
    low = -warp_max(-low);
    high = warp_max(high);
    for (int i = lane; i < 32; i += WARP)  // the first of several, also of 0.0 and -0.0
        if (affine ? x[i] == low : fabsf(x[i]) == largest) first = fminf(first, (float)i);
    first = -warp_max(-first);
    float foremost = warp_any(odd) ? 0.0f : x[(int)first], top = (float)((1 << size) - 1), z = (float)(1 << (size - 1)), d, inverse;
    bool empty = false;
    if (affine)
        d = __fdiv_rn(__fadd_rn(__fsub_rn(high, foremost), 0.0f), top);
    else if (size == 8)
        d = __fdiv_rn(largest, 127.0f);
    else if (tabled) {
        empty = largest < 1e-15f;
        d = __fdiv_rn(empty ? 1.0f : foremost, table[0]);
    } else
        d = __fdiv_rn(__fadd_rn(foremost, 0.0f), -z);
    inverse = fabsf(d) >= LEAST_INVERTIBLE ? __fdiv_rn(1.0f, d) : 0.0f;
    auto code = [&](int i) {
        if (affine) return (unsigned)fminf(__fadd_rn(__fmul_rn(__fsub_rn(x[i], foremost), inverse), 0.5f), top);
        float quotient = __fmul_rn(x[i], inverse);
        if (size == 8) return (unsigned)(int)__fadd_rn(quotient, copysignf(BELOW_HALF, quotient)) & 255u;
        if (!tabled) return (unsigned)fminf(__fadd_rn(quotient, z + 0.5f), top);
        unsigned index = 0;
        while (index < 15 && quotient >= (table[index] + table[index + 1]) * 0.5f) index++;  // of two equally near numbers the upper
        return index;
    };
    if (tabled && !warp_any(odd)) {  // each lane alone: in float32 the order affects the sum
        float products = 0, squares = 0;
        for (int i = 0; i < 32; i++) {
            float worth = table[code(i)], weighted = __fmul_rn(__fmul_rn(x[i], x[i]), worth);
            products = i ? __fadd_rn(products, __fmul_rn(weighted, x[i])) : __fmul_rn(weighted, x[i]);
            squares = i ? __fadd_rn(squares, __fmul_rn(weighted, worth)) : __fmul_rn(weighted, worth);
        }
        d = empty ? 0.0f : __fdiv_rn(products, squares);
    }
    if (warp_any(odd) || !(fabsf(held(d, f)) <= LARGEST_FLOAT) || (affine && !(fabsf(held(foremost, f)) <= LARGEST_FLOAT))) {
        *refused = 1;
        return;
    }
    for (int i = lane; i < block_width; i += WARP) {
        unsigned byte = 0;
        if (i < head)
            byte = encode(i < 2 ? d : foremost, f) >> (i % 2 * 8);
        else if (i < head + fifth)
            for (int bit = 0; bit < 8; bit++) byte |= (code((i - head) * 8 + bit) >> 4) << bit;
        else
            byte = size == 8 ? code(i - head) : (code(i - head - fifth) & 15) | (code(i - head - fifth + 16) & 15) << 4;
        block[i] = (unsigned char)byte;
    }
}

extern "C" __global__ void dequantize_ggml(const unsigned char* codes, const float* table, float* out, long long n, int size,
                                           int affine, int tabled) {
    Element f = FLOAT16;
    BLOCK_GIVEN;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = at / 32;
    if (row >= n) return;
    const unsigned char* block = codes + row * block_width;
    int i = (int)(at % 32), code;
    if (size == 8)
        code = (signed char)block[head + i];
    else {
        code = block[head + fifth + i % 16] >> (i / 16 * 4) & 15;
        if (fifth) code |= (block[head + i / 8] >> (i % 8) & 1) << 4;
        if (!affine && !tabled) code -= 1 << (size - 1);
    }
    float product = __fmul_rn(tabled ? table[code] : (float)code, decode(block[0] | (unsigned)block[1] << 8, f));
    out[at] = affine ? __fadd_rn(product, decode(block[2] | (unsigned)block[3] << 8, f)) : product;
}
