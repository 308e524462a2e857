// A harness: a paged KV cache, a prefix cache and a block pool, which kvref calls over standard input and output (kvref/spec/protocol.md):
//
//     cmake -S conformance/harnesses/cpp -B build && cmake --build build
//     kvref check --exec build/harness
//
// --bug double-free: a free block can be freed again and then gets two owners.

#include <iostream>
#include <memory>
#include <optional>

#include "block_pool.hpp"
#include "prefix_cache.hpp"
#include "sdk/kvref.hpp"

namespace {

using kvref::Array;
using kvref::Sizes;
using Pair = std::pair<Array, Array>;

PagedConfig paged_config(const Sizes& sizes) {
    return {sizes.integer("num_blocks"), sizes.integer("block_size"), sizes.integer("num_layers"), sizes.integer("num_kv_heads"),
            sizes.integer("head_dim")};
}

// The operations of the family `paged`, in terms of a cache.
template <typename Cache>
class Paged {
public:
    template <typename... Arguments>
    explicit Paged(const PagedConfig& config, Arguments&&... arguments) : config(config), cache(config, std::forward<Arguments>(arguments)...) {}

    std::int64_t num_free_blocks() const { return cache.pool().num_free(); }
    double utilization() const { return cache.pool().utilization(); }
    std::int64_t create() { return cache.create(); }
    void drop(std::int64_t sequence) { cache.drop(sequence); }
    std::int64_t fork(std::int64_t sequence) { return cache.fork(sequence); }
    void truncate(std::int64_t sequence, std::int64_t length) { cache.truncate(sequence, length); }

    void remove(std::int64_t sequence, std::int64_t start, std::int64_t stop, const std::optional<std::vector<double>>& frequencies,
                const std::optional<std::string>& layout) {
        if (!frequencies) return cache.remove(sequence, start, stop, nullptr);
        const std::size_t count = frequencies->size();
        bool valid = count > 0 && static_cast<std::int64_t>(count) <= config.head_dim / 2;
        for (double each : *frequencies) valid = valid && std::isfinite(each);
        if (!valid) throw kvref::Error("ConfigError", "frequencies: expected 1 to " + std::to_string(config.head_dim / 2) + " finite numbers");
        const std::string pairs = layout.value_or("halves");
        if (pairs != "halves" && pairs != "pairs") throw kvref::Error("ConfigError", "layout: expected halves or pairs, got " + pairs);
        const Rotary rotary{*frequencies, pairs == "pairs"};
        cache.remove(sequence, start, stop, &rotary);
    }

    void ensure_capacity(std::int64_t sequence, std::int64_t num_tokens) { cache.ensure_capacity(sequence, num_tokens); }

    void write(std::int64_t sequence, std::int64_t layer, std::int64_t start, const Array& keys, const Array& values) {
        cache.write(sequence, layer, start, {keys.numbers, values.numbers, keys.shape[0]});
    }

    void append(const Integers& sequences, std::int64_t layer, const Array& keys, const Array& values) {
        kvref::in_range(layer, config.num_layers, "LayerOutOfRange", "layer");
        cache.append(sequences, layer, 1, {keys.numbers, values.numbers, keys.shape[0]});
    }

    void append_step(const Integers& sequences, const Array& keys, const Array& values) {
        cache.append(sequences, 0, config.num_layers, {keys.numbers, values.numbers, keys.shape[1]});
    }

    Pair read(std::int64_t sequence, std::int64_t layer, const Integers& positions) const {
        return pair(cache.read(sequence, layer, positions));
    }

    Pair gather(std::int64_t sequence, std::int64_t layer) const { return pair(cache.gather(sequence, layer)); }

    std::tuple<Array, Array, Integers> gather_batch(const Integers& sequences, std::int64_t layer) const {
        kvref::in_range(layer, config.num_layers, "LayerOutOfRange", "layer");
        Tokens all;
        Integers offsets{0};
        for (std::int64_t sequence : sequences) {
            const Tokens tokens = cache.gather(sequence, layer);
            all.keys.insert(all.keys.end(), tokens.keys.begin(), tokens.keys.end());
            all.values.insert(all.values.end(), tokens.values.begin(), tokens.values.end());
            all.count += tokens.count;
            offsets.push_back(all.count);
        }
        auto [keys, values] = pair(all);
        return {keys, values, offsets};
    }

    std::int64_t length(std::int64_t sequence, std::int64_t layer) const { return cache.length(sequence, layer); }

    Integers lengths(const Integers& sequences, std::int64_t layer) const {
        kvref::in_range(layer, config.num_layers, "LayerOutOfRange", "layer");
        Integers found;
        for (std::int64_t sequence : sequences) found.push_back(cache.length(sequence, layer));
        return found;
    }

    Integers block_table(std::int64_t sequence, std::int64_t layer) const { return cache.block_table(sequence, layer); }

    std::vector<Integers> block_tables(const Integers& sequences, std::int64_t layer) const {
        kvref::in_range(layer, config.num_layers, "LayerOutOfRange", "layer");
        std::vector<Integers> tables;
        std::size_t most = 0;
        for (std::int64_t sequence : sequences) {
            tables.push_back(cache.block_table(sequence, layer));
            most = std::max(most, tables.back().size());
        }
        for (Integers& table : tables) table.resize(most, -1);  // -1 pads shorter tables
        return tables;
    }

    Integers slot_mapping(std::int64_t sequence, std::int64_t layer, std::int64_t start, std::int64_t count) const {
        return cache.slot_mapping(sequence, layer, start, count);
    }

    Array attend(std::int64_t sequence, std::int64_t layer, const Array& query, double scale) const {
        return {query.shape, cache.attend(sequence, layer, query.numbers, query.shape[1], scale)};
    }

protected:
    Pair pair(const Tokens& tokens) const {
        const kvref::Shape shape{tokens.count, config.num_kv_heads, config.head_dim};
        return {{shape, tokens.keys}, {shape, tokens.values}};
    }

    PagedConfig config;
    Cache cache;
};

// The operations of the family `prefix`: those of `paged`, and the index of cached blocks.
class Prefix : public Paged<PrefixCache> {
public:
    using Paged<PrefixCache>::Paged;

    std::int64_t begin(const Integers& tokens, const std::optional<std::string>& salt, const std::optional<kvref::Json>& media,
                       const std::optional<std::string>& adapter) {
        return cache.begin(prompt(tokens, salt, media, adapter));
    }

    std::int64_t match(const Integers& tokens, const std::optional<std::string>& salt, const std::optional<kvref::Json>& media,
                       const std::optional<std::string>& adapter) {
        return cache.match(prompt(tokens, salt, media, adapter));
    }

    void commit(std::int64_t sequence, const Integers& tokens) {
        check(tokens);
        cache.commit(sequence, tokens);
    }

    void reset() { cache.reset(); }

private:
    static Prompt prompt(const Integers& tokens, const std::optional<std::string>& salt, const std::optional<kvref::Json>& media,
                         const std::optional<std::string>& adapter) {
        check(tokens);
        Prompt prompt{salt.value_or(""), adapter.value_or(""), tokens, {}};
        for (const kvref::Json& item : media.value_or(kvref::Json()).items) {
            prompt.media.push_back({position(item, 0), position(item, 1), item.items.at(2).text});
        }
        return prompt;
    }

    static std::int64_t position(const kvref::Json& item, std::size_t index) {
        const kvref::Json& value = item.items.at(index);
        if (value.kind != kvref::Json::Kind::integer) throw kvref::Error("PositionOutOfRange", "media: expected integers, got " + value.dump());
        return value.whole;
    }

    static void check(const Integers& tokens) {
        for (std::int64_t token : tokens) kvref::in_range(token, std::numeric_limits<std::int64_t>::max(), "TokenOutOfRange", "token");
    }
};

const std::vector<std::string> SIZES{"num_blocks >= 0", "block_size", "num_layers", "num_kv_heads", "head_dim", "dtype: format"};

template <typename T>
kvref::Family<T> add_paged(kvref::Family<T> family) {
    const std::string keys = "keys [n, num_kv_heads, head_dim]", values = "values [n, num_kv_heads, head_dim]";
    return family.operation("num_free_blocks", {}, &T::num_free_blocks)
        .operation("utilization", {}, &T::utilization)
        .operation("create", {}, &T::create)
        .operation("drop", {"sequence"}, &T::drop)
        .operation("fork", {"sequence"}, &T::fork)
        .operation("truncate", {"sequence", "length"}, &T::truncate)
        .operation("remove", {"sequence", "start", "stop", "frequencies", "layout"}, &T::remove)
        .operation("ensure_capacity", {"sequence", "num_tokens"}, &T::ensure_capacity)
        .operation("write", {"sequence", "layer", "start", keys, values}, &T::write)
        .operation("append", {"sequences", "layer", "keys [sequences, num_kv_heads, head_dim]", "values [sequences, num_kv_heads, head_dim]"}, &T::append)
        .operation("append_step", {"sequences", "keys [num_layers, sequences, num_kv_heads, head_dim]",
                                   "values [num_layers, sequences, num_kv_heads, head_dim]"}, &T::append_step)
        .operation("read", {"sequence", "layer", "positions"}, &T::read)
        .operation("gather", {"sequence", "layer"}, &T::gather)
        .operation("gather_batch", {"sequences", "layer"}, &T::gather_batch)
        .operation("length", {"sequence", "layer"}, &T::length)
        .operation("lengths", {"sequences", "layer"}, &T::lengths)
        .operation("block_table", {"sequence", "layer"}, &T::block_table)
        .operation("block_tables", {"sequences", "layer"}, &T::block_tables)
        .operation("slot_mapping", {"sequence", "layer", "start", "count"}, &T::slot_mapping)
        .operation("attend", {"sequence", "layer", "query [num_queries, num_query_heads, head_dim]", "scale"}, &T::attend);
}

}  // namespace

int main(int argc, char** argv) {
    const bool bug = argc == 3 && argv[1] == std::string("--bug") && argv[2] == std::string("double-free");
    if (argc > 1 && !bug) {
        std::cerr << "usage: harness [--bug double-free]\n";
        return 2;
    }
    kvref::Harness harness("paged-cpp", "1.0", {"float32"});

    harness.family<BlockPool>("blocks", {"num_blocks >= 0"},
                              [=](const Sizes& sizes) { return std::make_shared<BlockPool>(sizes.integer("num_blocks"), bug); })
        .operation("num_blocks", {}, &BlockPool::num_blocks)
        .operation("num_free", {}, &BlockPool::num_free)
        .operation("num_used", {}, &BlockPool::num_used)
        .operation("utilization", {}, &BlockPool::utilization)
        .operation("allocate", {}, &BlockPool::allocate)
        .operation("allocate_many", {"count"}, &BlockPool::allocate_many)
        .operation("free", {"block"}, &BlockPool::free)
        .operation("share", {"block"}, &BlockPool::share)
        .operation("references", {"block"}, &BlockPool::references);

    add_paged(harness.family<Paged<PagedCache>>("paged", SIZES, [=](const Sizes& sizes) {
        const PagedConfig config = paged_config(sizes);
        return std::make_shared<Paged<PagedCache>>(config, std::make_unique<BlockPool>(config.num_blocks, bug));
    }));

    add_paged(harness.family<Prefix>("prefix", SIZES, [](const Sizes& sizes) { return std::make_shared<Prefix>(paged_config(sizes)); }))
        .operation("begin", {"tokens", "salt", "media", "adapter"}, &Prefix::begin)
        .operation("match", {"tokens", "salt", "media", "adapter"}, &Prefix::match)
        .operation("commit", {"sequence", "tokens"}, &Prefix::commit)
        .operation("reset", {}, &Prefix::reset);

    return harness.serve();
}
