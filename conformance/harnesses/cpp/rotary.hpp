// Rotary embedding (RoPE): pair i of a head is rotated by position * frequencies[i] radians. Numbers without a pair are not rotated.
#pragma once

#include <cmath>
#include <vector>

#include "sdk/kvref.hpp"

using Floats = std::vector<float>;

struct Rotary {
    std::vector<double> frequencies;
    bool pairs;  // pairs are numbers 2 i and 2 i + 1; otherwise i and i + the number of frequencies

    // Rotates keys [..., dim] by a number of positions, which can be negative. Throws NonFinite if a key becomes infinite.
    void turn(Floats& keys, std::int64_t dim, std::int64_t by) const {
        const std::int64_t count = static_cast<std::int64_t>(frequencies.size());
        for (std::int64_t i = 0; i < count; ++i) {
            const double angle = static_cast<double>(by) * frequencies[static_cast<std::size_t>(i)];
            const float cos = static_cast<float>(std::cos(angle)), sin = static_cast<float>(std::sin(angle));
            const std::int64_t first = pairs ? 2 * i : i, second = pairs ? 2 * i + 1 : i + count;
            for (std::size_t at = 0; at < keys.size(); at += static_cast<std::size_t>(dim)) {
                const float x = keys[at + first], y = keys[at + second];
                keys[at + first] = x * cos - y * sin;
                keys[at + second] = y * cos + x * sin;
                if (std::isinf(keys[at + first]) || std::isinf(keys[at + second])) {
                    throw kvref::Error("NonFinite", "keys: expected finite numbers after the rotation, got infinity");
                }
            }
        }
    }
};
