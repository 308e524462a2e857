// The exception that a cache throws: `kind` is one of the specification's error names.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

struct KVError : std::runtime_error {
    KVError(std::string kind, const std::string& message) : std::runtime_error(message), kind(std::move(kind)) {}
    std::string kind;
};

// Throws an error of this kind unless 0 <= value < stop.
inline void in_range(std::int64_t value, std::int64_t stop, const char* kind, const std::string& what) {
    if (value < 0 || value >= stop) {
        throw KVError(kind, what + ": expected an integer in [0, " + std::to_string(stop) + "), got " + std::to_string(value));
    }
}
