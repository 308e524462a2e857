// The paged cache: sequences of tokens in blocks of one pool, as in PagedAttention. Values are stored as float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "block_pool.hpp"
#include "rotary.hpp"

using Integers = kvref::Integers;

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
    PagedCache(const PagedConfig& config, std::unique_ptr<BlockPool> pool)
        : config_(config),
          row_(config.num_kv_heads * config.head_dim),
          keys_(config.num_blocks * config.block_size * row_),
          values_(keys_.size()),
          pool_(std::move(pool)) {}

    const PagedConfig& config() const { return config_; }
    const BlockPool& pool() const { return *pool_; }
    virtual ~PagedCache() = default;

    // Creates an empty sequence and returns its id; an id is never reused.
    virtual std::int64_t create() {
        sequences_[next_].resize(config_.num_layers);
        return next_++;
    }

    virtual void drop(std::int64_t sequence) {
        cut(found(sequence), 0);
        sequences_.erase(sequence);
    }

    // Creates a sequence that shares the blocks of another until one of them writes (copy-on-write).
    virtual std::int64_t fork(std::int64_t sequence) {
        const Sequence layers = found(sequence);
        for (const Layer& layer : layers) {
            for (std::int64_t block : layer.table) pool_->share(block);
        }
        sequences_[next_] = layers;
        return next_++;
    }

    // Keeps the first tokens of every layer and frees the blocks after them.
    virtual void truncate(std::int64_t sequence, std::int64_t length) {
        kvref::in_range(length, shortest(sequence) + 1, "PositionOutOfRange", "length");
        Sequence& layers = found(sequence);
        for (Layer& layer : layers) layer.length = length;
        cut(layers, blocks_for(length));
    }

    // Removes positions [start, stop) of every layer. Later tokens move to lower positions; rotary keys are re-rotated.
    virtual void remove(std::int64_t sequence, std::int64_t start, std::int64_t stop, const Rotary* rotary) {
        kvref::in_range(stop, shortest(sequence) + 1, "PositionOutOfRange", "stop");
        kvref::in_range(start, stop + 1, "PositionOutOfRange", "start");
        if (start == stop) return;
        Sequence& layers = found(sequence);
        const std::int64_t gap = stop - start;
        std::vector<Span> written;
        std::vector<Tokens> moved(layers.size());
        std::int64_t longest = 0;
        for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
            const std::int64_t end = layers[layer].length - gap;
            written.push_back({sequence, layer, start, end});
            longest = std::max(longest, end);
            for (std::int64_t position = stop; position < layers[layer].length; ++position) take(layers[layer], position, moved[layer]);
            if (rotary) rotary->turn(moved[layer].keys, config_.head_dim, -gap);
        }
        prepare({}, written);
        for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
            for (std::int64_t i = 0; i < moved[layer].count; ++i) put(layers[layer], start + i, moved[layer], i);
            layers[layer].length -= gap;
        }
        cut(layers, blocks_for(longest));
    }

    // Allocates up to ceil(num_tokens / block_size) blocks in every layer, or throws OutOfBlocks and allocates none.
    void ensure_capacity(std::int64_t sequence, std::int64_t num_tokens) {
        found(sequence);
        kvref::in_range(num_tokens, std::numeric_limits<std::int64_t>::max(), "PositionOutOfRange", "num_tokens");
        prepare({{sequence, num_tokens}}, {});
    }

    // Writes tokens at start, start + 1, ...; start is at most the layer's length, so there are no gaps.
    virtual void write(std::int64_t sequence, std::int64_t layer, std::int64_t start, const Tokens& tokens) {
        Layer& to = found(sequence, layer);
        kvref::in_range(start, to.length + 1, "PositionOutOfRange", "start");
        const std::int64_t end = start + tokens.count;
        prepare({{sequence, end}}, {{sequence, layer, start, end}});
        for (std::int64_t i = 0; i < tokens.count; ++i) put(to, start + i, tokens, i);
        to.length = std::max(to.length, end);
    }

    // Appends one token to each sequence in layers [first, first + count), to all of them or to none. Token [layer, i] of `tokens`
    // belongs to sequence i of the batch.
    void append(const Integers& sequences, std::int64_t first, std::int64_t count, const Tokens& tokens) {
        std::map<std::int64_t, std::int64_t> needed, times;
        std::vector<Span> written;
        for (std::int64_t sequence : sequences) {
            ++times[sequence];
            for (std::int64_t layer = first; layer < first + count; ++layer) {
                const std::int64_t end = found(sequence, layer).length + times[sequence];
                needed[sequence] = std::max(needed[sequence], end);
                written.push_back({sequence, layer, end - 1, end});
            }
        }
        prepare(needed, written);
        std::int64_t token = 0;
        for (std::int64_t layer = first; layer < first + count; ++layer) {
            for (std::int64_t sequence : sequences) {
                Layer& to = found(sequence, layer);
                put(to, to.length++, tokens, token++);
            }
        }
    }

    // Returns the tokens at these positions, in this order.
    Tokens read(std::int64_t sequence, std::int64_t layer, const Integers& positions) const {
        const Layer& from = found(sequence, layer);
        for (std::int64_t position : positions) kvref::in_range(position, from.length, "PositionOutOfRange", "position");
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

    // block * block_size + offset of each position; all positions are inside the sequence's blocks.
    Integers slot_mapping(std::int64_t sequence, std::int64_t layer, std::int64_t start, std::int64_t count) const {
        const Layer& from = found(sequence, layer);
        const std::int64_t room = static_cast<std::int64_t>(from.table.size()) * config_.block_size;
        kvref::in_range(start, room + 1, "PositionOutOfRange", "start");
        kvref::in_range(count, room - start + 1, "PositionOutOfRange", "count");
        Integers slots;
        for (std::int64_t position = start; position < start + count; ++position) slots.push_back(slot(from, position));
        return slots;
    }

    // softmax(scale q k') v over the layer's tokens; query and result are [num_queries, num_query_heads, head_dim].
    Floats attend(std::int64_t sequence, std::int64_t layer, const Floats& query, std::int64_t num_heads, double scale) const {
        const Tokens tokens = gather(sequence, layer);
        if (num_heads % config_.num_kv_heads != 0) {
            throw kvref::Error("ShapeMismatch", "query: expected a multiple of " + std::to_string(config_.num_kv_heads) + " heads, got " +
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
            for (double& weight : weights) sum += weight = std::exp(weight - largest);  // at most 1, so the sum cannot overflow
            for (std::int64_t d = 0; d < dim; ++d) {
                double mean = 0.0;
                for (std::int64_t i = 0; i < tokens.count; ++i) mean += weights[i] / sum * tokens.values[i * row_ + head * dim + d];
                out[at + d] = static_cast<float>(mean);
            }
        }
        return out;
    }

protected:
    struct Layer {
        Integers table;
        std::int64_t length = 0;  // one per layer: during a step the first layers have one token more
    };
    using Sequence = std::vector<Layer>;

    // Whether a block must not be overwritten although only one sequence references it.
    virtual bool kept(std::int64_t) const { return false; }

    const Sequence& found(std::int64_t sequence) const {
        const auto known = sequences_.find(sequence);
        if (known == sequences_.end()) {
            throw kvref::Error("SequenceNotFound", "unknown sequence " + std::to_string(sequence) + " (never created, or already dropped)");
        }
        return known->second;
    }

    const Layer& found(std::int64_t sequence, std::int64_t layer) const {
        const Sequence& layers = found(sequence);
        kvref::in_range(layer, config_.num_layers, "LayerOutOfRange", "layer");
        return layers[layer];
    }

    Sequence& found(std::int64_t sequence) { return const_cast<Sequence&>(std::as_const(*this).found(sequence)); }

    Layer& found(std::int64_t sequence, std::int64_t layer) {
        return const_cast<Layer&>(std::as_const(*this).found(sequence, layer));
    }

    // The number of tokens that all layers have.
    std::int64_t shortest(std::int64_t sequence) const {
        std::int64_t least = std::numeric_limits<std::int64_t>::max() - 1;
        for (const Layer& layer : found(sequence)) least = std::min(least, layer.length);
        return least;
    }

    std::int64_t blocks_for(std::int64_t tokens) const {
        return tokens > 0 ? (tokens - 1) / config_.block_size + 1 : 0;  // ceil, without overflow
    }

    PagedConfig config_;

private:
    // Positions of a layer that a call is going to write.
    struct Span {
        std::int64_t sequence, layer, start, end;
    };

    // Keeps `count` blocks in each layer and frees the others, from the end.
    void cut(Sequence& layers, std::int64_t count) {
        while (static_cast<std::int64_t>(layers[0].table.size()) > count) {
            for (Layer& layer : layers) {
                pool_->free(layer.table.back());
                layer.table.pop_back();
            }
        }
    }

    // Allocates blocks for new tokens in every layer of each sequence, and copies shared blocks that are going to be written: for all
    // sequences or for none.
    void prepare(const std::map<std::int64_t, std::int64_t>& num_tokens, const std::vector<Span>& written) {
        std::vector<std::pair<std::int64_t, std::int64_t>> missing;
        std::int64_t most = 0;  // blocks per layer
        for (const auto& [sequence, tokens] : num_tokens) {
            const std::int64_t held = static_cast<std::int64_t>(found(sequence)[0].table.size());
            const std::int64_t more = blocks_for(tokens) - held;
            if (more > 0) missing.emplace_back(sequence, more), most += std::min(more, config_.num_blocks + 1);
        }
        const std::vector<std::int64_t*> copies = shared(written);
        const std::int64_t needed = most * config_.num_layers + static_cast<std::int64_t>(copies.size());
        if (needed > pool_->num_free()) {
            throw kvref::Error("OutOfBlocks", "out of blocks: " + std::to_string(needed) + " needed, " + std::to_string(pool_->num_free()) + " free");
        }
        for (std::int64_t* block : copies) {
            const std::int64_t copy = pool_->allocate(), size = config_.block_size * row_;
            std::copy_n(&keys_[*block * size], size, &keys_[copy * size]);
            std::copy_n(&values_[*block * size], size, &values_[copy * size]);
            pool_->free(*block);
            *block = copy;
        }
        for (const auto& [sequence, more] : missing) {
            for (Layer& layer : found(sequence)) {
                for (std::int64_t i = 0; i < more; ++i) layer.table.push_back(pool_->allocate());
            }
        }
    }

    // The table entries whose blocks have to be copied before the write. If all references to a block are going to write to it, the last
    // one keeps it.
    std::vector<std::int64_t*> shared(const std::vector<Span>& written) {
        std::vector<std::int64_t*> copies;
        std::map<std::int64_t, std::int64_t> others;  // by block, the number of other references that need it unchanged
        std::set<std::int64_t*> seen;
        for (const Span& span : written) {
            Integers& table = found(span.sequence, span.layer).table;
            const std::int64_t last = std::min(blocks_for(span.end), static_cast<std::int64_t>(table.size()));
            for (std::int64_t entry = span.start / config_.block_size; span.start < span.end && entry < last; ++entry) {
                std::int64_t* block = &table[entry];
                if (!seen.insert(block).second) continue;  // a batch can contain a sequence twice
                const auto left = others.emplace(*block, pool_->references(*block) - !kept(*block)).first;
                if (left->second-- > 0) copies.push_back(block);
            }
        }
        return copies;
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

    std::int64_t row_;  // numbers per token
    Floats keys_, values_;  // [num_blocks * block_size, num_kv_heads, head_dim], of all layers and sequences
    std::int64_t next_ = 0;

protected:
    std::unique_ptr<BlockPool> pool_;
    std::map<std::int64_t, Sequence> sequences_;
};
