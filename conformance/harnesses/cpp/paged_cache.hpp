// The paged cache: sequences of tokens in blocks of one pool, as in PagedAttention. Values are stored as float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "block_pool.hpp"

using Floats = std::vector<float>;
using Integers = std::vector<std::int64_t>;

struct PagedConfig {
    std::int64_t num_blocks, block_size, num_layers, num_kv_heads, head_dim;
};

// Keys and values, [tokens, num_kv_heads, head_dim].
struct Tokens {
    Floats keys, values;
    std::int64_t count = 0;
};

class PagedCache {
public:
    PagedCache(const PagedConfig& config, bool frees_twice)
        : config_(config),
          row_(config.num_kv_heads * config.head_dim),
          pool_(config.num_blocks, frees_twice),
          keys_(config.num_blocks * config.block_size * row_),
          values_(keys_.size()) {}

    const PagedConfig& config() const { return config_; }
    const BlockPool& pool() const { return pool_; }

    // A new, empty sequence: an id that was never used before.
    std::int64_t create() {
        sequences_[next_].resize(config_.num_layers);
        return next_++;
    }

    void drop(std::int64_t sequence) {
        for (const Layer& layer : found(sequence)) {
            for (std::int64_t block : layer.table) pool_.free(block);
        }
        sequences_.erase(sequence);
    }

    // Hold ceil(num_tokens / block_size) blocks in every layer, or throw OutOfBlocks and take none.
    void ensure_capacity(std::int64_t sequence, std::int64_t num_tokens) {
        found(sequence);
        in_range(num_tokens, std::numeric_limits<std::int64_t>::max(), "PositionOutOfRange", "num_tokens");
        ensure({{sequence, num_tokens}});
    }

    // Write tokens at start, start + 1, ...: at or before the layer's length, so that there are no holes.
    void write(std::int64_t sequence, std::int64_t layer, std::int64_t start, const Tokens& tokens) {
        Layer& to = found(sequence, layer);
        in_range(start, to.length + 1, "PositionOutOfRange", "start");
        const std::int64_t end = start + tokens.count;
        ensure({{sequence, end}});
        for (std::int64_t i = 0; i < tokens.count; ++i) put(to, start + i, tokens, i);
        to.length = std::max(to.length, end);
    }

    // One token to each sequence in the layers first .. first + count: to all of them or to none. Token [layer, i] of `tokens` is
    // for sequence i of the batch.
    void append(const Integers& sequences, std::int64_t first, std::int64_t count, const Tokens& tokens) {
        std::map<std::int64_t, std::int64_t> needed, times;
        for (std::int64_t sequence : sequences) {
            ++times[sequence];
            for (std::int64_t layer = first; layer < first + count; ++layer) {
                needed[sequence] = std::max(needed[sequence], found(sequence, layer).length + times[sequence]);
            }
        }
        ensure(needed);
        std::int64_t token = 0;
        for (std::int64_t layer = first; layer < first + count; ++layer) {
            for (std::int64_t sequence : sequences) {
                Layer& to = found(sequence, layer);
                put(to, to.length++, tokens, token++);
            }
        }
    }

    // The tokens at some positions, in the order asked for.
    Tokens read(std::int64_t sequence, std::int64_t layer, const Integers& positions) const {
        const Layer& from = found(sequence, layer);
        for (std::int64_t position : positions) in_range(position, from.length, "PositionOutOfRange", "position");
        Tokens tokens;
        for (std::int64_t position : positions) take(from, position, tokens);
        return tokens;
    }

    Tokens gather(std::int64_t sequence, std::int64_t layer) const {
        const Layer& from = found(sequence, layer);
        Tokens tokens;
        for (std::int64_t position = 0; position < from.length; ++position) take(from, position, tokens);
        return tokens;
    }

    std::int64_t length(std::int64_t sequence, std::int64_t layer) const { return found(sequence, layer).length; }
    const Integers& block_table(std::int64_t sequence, std::int64_t layer) const { return found(sequence, layer).table; }

    // block * block_size + offset of each position, all within the blocks held.
    Integers slot_mapping(std::int64_t sequence, std::int64_t layer, std::int64_t start, std::int64_t count) const {
        const Layer& from = found(sequence, layer);
        const std::int64_t room = static_cast<std::int64_t>(from.table.size()) * config_.block_size;
        in_range(start, room + 1, "PositionOutOfRange", "start");
        in_range(count, room - start + 1, "PositionOutOfRange", "count");
        Integers slots;
        for (std::int64_t position = start; position < start + count; ++position) slots.push_back(slot(from, position));
        return slots;
    }

    // softmax(scale q k') v over the layer's tokens; query and result are [num_queries, num_query_heads, head_dim].
    Floats attend(std::int64_t sequence, std::int64_t layer, const Floats& query, std::int64_t num_heads, double scale) const {
        const Tokens tokens = gather(sequence, layer);
        if (num_heads % config_.num_kv_heads != 0) {
            throw KVError("ShapeMismatch", "query: expected a multiple of " + std::to_string(config_.num_kv_heads) + " heads, got " +
                                               std::to_string(num_heads));
        }
        const std::int64_t dim = config_.head_dim, group = num_heads / config_.num_kv_heads;
        Floats out(query.size(), 0.0f);
        std::vector<double> weights(tokens.count);
        for (std::size_t at = 0; at < query.size() && tokens.count > 0; at += dim) {
            const std::int64_t head = static_cast<std::int64_t>(at) / dim % num_heads / group;
            double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
            for (std::int64_t i = 0; i < tokens.count; ++i) {
                const float* key = &tokens.keys[i * row_ + head * dim];
                double score = 0.0;
                for (std::int64_t d = 0; d < dim; ++d) score += static_cast<double>(query[at + d]) * key[d];
                weights[i] = scale * score;
                largest = std::max(largest, weights[i]);
            }
            for (double& weight : weights) sum += weight = std::exp(weight - largest);  // at most 1: nothing overflows
            for (std::int64_t d = 0; d < dim; ++d) {
                double mean = 0.0;
                for (std::int64_t i = 0; i < tokens.count; ++i) mean += weights[i] / sum * tokens.values[i * row_ + head * dim + d];
                out[at + d] = static_cast<float>(mean);
            }
        }
        return out;
    }

private:
    struct Layer {
        Integers table;
        std::int64_t length = 0;  // of each layer on its own: during a step the first ones are a token ahead
    };
    using Sequence = std::vector<Layer>;

    const Sequence& found(std::int64_t sequence) const {
        const auto known = sequences_.find(sequence);
        if (known == sequences_.end()) {
            throw KVError("SequenceNotFound", "sequence: expected one that was created and not dropped, got " + std::to_string(sequence));
        }
        return known->second;
    }

    const Layer& found(std::int64_t sequence, std::int64_t layer) const {
        const Sequence& layers = found(sequence);
        in_range(layer, config_.num_layers, "LayerOutOfRange", "layer");
        return layers[layer];
    }

    Layer& found(std::int64_t sequence, std::int64_t layer) {
        return const_cast<Layer&>(std::as_const(*this).found(sequence, layer));
    }

    // Room for so many tokens in every layer of each sequence, for all of them or for none.
    void ensure(const std::map<std::int64_t, std::int64_t>& num_tokens) {
        std::vector<std::pair<std::int64_t, std::int64_t>> missing;
        std::int64_t most = 0;  // blocks a layer
        for (const auto& [sequence, tokens] : num_tokens) {
            const std::int64_t held = static_cast<std::int64_t>(sequences_[sequence][0].table.size());
            const std::int64_t more = (tokens - 1) / config_.block_size + (tokens > 0) - held;  // ceil, without overflow
            if (more > 0) missing.emplace_back(sequence, more), most += std::min(more, config_.num_blocks + 1);
        }
        if (most * config_.num_layers > pool_.num_free()) {
            throw KVError("OutOfBlocks", "blocks: expected " + std::to_string(most) + " free ones in each of " +
                                             std::to_string(config_.num_layers) + " layers, got " + std::to_string(pool_.num_free()) +
                                             " in all");
        }
        for (const auto& [sequence, more] : missing) {
            for (Layer& layer : sequences_[sequence]) {
                for (std::int64_t i = 0; i < more; ++i) layer.table.push_back(pool_.allocate());
            }
        }
    }

    std::int64_t slot(const Layer& layer, std::int64_t position) const {
        return layer.table[position / config_.block_size] * config_.block_size + position % config_.block_size;
    }

    void put(const Layer& layer, std::int64_t position, const Tokens& from, std::int64_t token) {
        const std::int64_t to = slot(layer, position) * row_;
        std::copy_n(&from.keys[token * row_], row_, &keys_[to]);
        std::copy_n(&from.values[token * row_], row_, &values_[to]);
    }

    void take(const Layer& layer, std::int64_t position, Tokens& into) const {
        const std::int64_t from = slot(layer, position) * row_;
        into.keys.insert(into.keys.end(), &keys_[from], &keys_[from] + row_);
        into.values.insert(into.values.end(), &values_[from], &values_[from] + row_);
        ++into.count;
    }

    PagedConfig config_;
    std::int64_t row_;  // numbers of a token
    BlockPool pool_;
    Floats keys_, values_;  // [num_blocks * block_size, num_kv_heads, head_dim], of all layers and sequences
    std::map<std::int64_t, Sequence> sequences_;
    std::int64_t next_ = 0;
};
