// Values of the protocol: integers, and arrays {"dtype", "shape", "base64"} in little-endian C order.
#pragma once

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "errors.hpp"

using Json = nlohmann::json;
using Shape = std::vector<std::int64_t>;

constexpr std::int64_t ANY = -1;  // an axis of any length

struct Array {
    Shape shape;
    std::vector<float> numbers;
};

inline std::string decoded_base64(const std::string& text) {
    static const auto values = [] {
        std::array<int, 256> values{};
        values.fill(-1);
        const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        for (int i = 0; i < 64; ++i) values[static_cast<unsigned char>(digits[i])] = i;
        return values;
    }();
    std::string bytes;
    unsigned buffer = 0;
    int bits = 0;
    for (unsigned char letter : text) {
        if (values[letter] < 0) break;  // the padding
        buffer = buffer << 6 | static_cast<unsigned>(values[letter]);
        bits += 6;
        if (bits >= 8) bytes.push_back(static_cast<char>(buffer >> (bits -= 8) & 255));
    }
    return bytes;
}

inline std::string encoded_base64(const void* data, std::size_t size) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::string text;
    for (std::size_t i = 0; i < size; i += 3) {
        const std::size_t left = std::min<std::size_t>(3, size - i);
        const unsigned three = bytes[i] << 16 | (left > 1 ? bytes[i + 1] << 8 : 0) | (left > 2 ? bytes[i + 2] : 0);
        for (std::size_t digit = 0; digit < 4; ++digit) text.push_back(digit <= left ? digits[three >> (18 - 6 * digit) & 63] : '=');
    }
    return text;
}

// Converts a float16 or bfloat16 code to float, exactly.
inline float widened(std::uint16_t code, bool is_bfloat16) {
    std::uint32_t bits = static_cast<std::uint32_t>(code) << 16;
    if (!is_bfloat16) {
        const std::uint32_t sign = (code & 0x8000u) << 16, exponent = code >> 10 & 31, mantissa = code & 1023;
        if (exponent == 0) {
            const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
            return sign ? -magnitude : magnitude;
        }
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    }
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::string shown(const Shape& shape) {
    std::string text;
    for (std::int64_t axis : shape) text += (text.empty() ? "" : ", ") + (axis == ANY ? std::string("n") : std::to_string(axis));
    return "[" + text + "]";
}

// Returns an array of this shape as floats, narrow floats widened. Throws ShapeMismatch, and DtypeMismatch for other dtypes.
inline Array array_of(const Json& args, const char* name, const Shape& wanted) {
    const Json& given = args.at(name);
    Array array{given.at("shape").get<Shape>(), {}};
    bool fits = array.shape.size() == wanted.size();
    for (std::size_t i = 0; fits && i < wanted.size(); ++i) fits = wanted[i] == ANY || wanted[i] == array.shape[i];
    if (!fits) {
        throw KVError("ShapeMismatch", std::string(name) + ": expected shape " + shown(wanted) + ", got " + shown(array.shape));
    }
    const std::string dtype = given.at("dtype"), bytes = decoded_base64(given.at("base64"));
    if (dtype == "float32") {
        array.numbers.resize(bytes.size() / sizeof(float));
        std::memcpy(array.numbers.data(), bytes.data(), bytes.size());
    } else if (dtype == "float16" || dtype == "bfloat16") {
        std::vector<std::uint16_t> codes(bytes.size() / sizeof(std::uint16_t));
        std::memcpy(codes.data(), bytes.data(), bytes.size());
        for (std::uint16_t code : codes) array.numbers.push_back(widened(code, dtype == "bfloat16"));
    } else {
        throw KVError("DtypeMismatch", std::string(name) + ": expected float32, float16 or bfloat16, got " + dtype);
    }
    return array;
}

template <typename Number>
Json sent(const std::vector<Number>& numbers, const Shape& shape, const char* dtype) {
    return {{"dtype", dtype}, {"shape", shape}, {"base64", encoded_base64(numbers.data(), numbers.size() * sizeof(Number))}};
}

// Returns an integer. Throws an error of this kind for anything else, also for 1.5, "1" and true.
inline std::int64_t integer(const Json& value, const char* kind, const char* name) {
    if (!value.is_number_integer()) throw KVError(kind, std::string(name) + ": expected an integer, got " + value.dump());
    return value.get<std::int64_t>();
}
