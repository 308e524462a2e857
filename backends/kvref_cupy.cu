// The kernels of kvref_cupy: rows quantized and read back, single values encoded and decoded, bit for bit as kvref.formats says.
//
// Arithmetic is written with the __f*_rn intrinsics, each of which rounds once, to nearest: the compiler may not fuse a product and
// a sum (FMT-AFF-04), nor divide by multiplying with a reciprocal. A warp takes a row, so that neighbours read neighbours.
//
// Compiled for a host (without __CUDACC__) a "warp" is one thread; the tests do so, where there is no GPU.

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

// A float of 8 or 16 bits, as kvref.formats.SmallFloat: infinity is 0 where it has none.
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
    // x = significand * 2^(exponent - 23), whole numbers both.
    unsigned significand = magnitude & 0x7fffffu;
    int exponent = -126;
    if (magnitude >> 23) {
        significand |= 0x800000u;
        exponent = (int)(magnitude >> 23) - 127;
    }
    int field = exponent + f.bias < 1 ? 1 : exponent + f.bias;  // subnormals share the unit of field 1
    int dropped = (field - f.bias - f.mantissa) - (exponent - 23);  // bits below the unit
    unsigned units = 0;
    if (dropped < 26) {  // beyond, x is less than half a unit
        unsigned rest = significand & ((1u << dropped) - 1), half = 1u << (dropped - 1);
        units = significand >> dropped;
        units += rest > half || (rest == half && (units & 1));  // ties to even; a carry walks into the exponent
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

// rows [n, width] -> codes [n, width], scale [n]. bits == 0 stands for INT8. refused becomes 1 where a row is not finite,
// or would not read back finite (FMT-LEVEL-05).
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
