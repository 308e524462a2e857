// A harness: a paged KV cache, a prefix cache and a block pool, which kvref calls over standard input and output (kvref/spec/protocol.md):
//
//     cmake -S conformance/harnesses/cpp -B build && cmake --build build
//     kvref check --exec build/harness
//
// --bug double-free: a free block can be freed again and then gets two owners.

#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>

#include "block_pool.hpp"
#include "prefix_cache.hpp"
#include "wire.hpp"

namespace {

const Json ABOUT = {{"name", "paged-cpp"}, {"version", "1.0"}, {"language", "c++"}, {"level", "exact"},
                    {"formats", {"float32"}}, {"families", {"blocks", "paged", "prefix"}}};

std::int64_t size_of(const Json& args, const char* name, std::int64_t least) {
    const std::int64_t size = integer(args.at(name), "ConfigError", name);
    if (size < least) {
        throw KVError("ConfigError",
                      std::string(name) + ": expected an integer of at least " + std::to_string(least) + ", got " + std::to_string(size));
    }
    return size;
}

PagedConfig paged_config(const Json& args) {
    if (args.at("dtype") != "float32") throw KVError("ConfigError", "dtype: expected float32, got " + args.at("dtype").dump());
    return {size_of(args, "num_blocks", 0), size_of(args, "block_size", 1), size_of(args, "num_layers", 1),
            size_of(args, "num_kv_heads", 1), size_of(args, "head_dim", 1)};
}

using Operations = std::map<std::string, std::function<Json(const Json&)>>;

std::int64_t block_of(const Json& args) { return integer(args.at("block"), "BlockNotAllocated", "block"); }

Operations operations_of(std::shared_ptr<BlockPool> pool) {
    return {
        {"num_blocks", [=](const Json&) -> Json { return pool->num_blocks(); }},
        {"num_free", [=](const Json&) -> Json { return pool->num_free(); }},
        {"num_used", [=](const Json&) -> Json { return pool->num_used(); }},
        {"utilization", [=](const Json&) -> Json { return pool->utilization(); }},
        {"allocate", [=](const Json&) -> Json { return pool->allocate(); }},
        {"allocate_many", [=](const Json& args) -> Json {
             return pool->allocate_many(integer(args.at("count"), "PositionOutOfRange", "count"));
         }},
        {"free", [=](const Json& args) -> Json {
             pool->free(block_of(args));
             return nullptr;
         }},
        {"share", [=](const Json& args) -> Json {
             pool->share(block_of(args));
             return nullptr;
         }},
        {"references", [=](const Json& args) -> Json { return pool->references(block_of(args)); }},
    };
}

std::int64_t sequence_of(const Json& args) { return integer(args.at("sequence"), "SequenceNotFound", "sequence"); }
std::int64_t layer_of(const Json& args) { return integer(args.at("layer"), "LayerOutOfRange", "layer"); }
std::int64_t position_of(const Json& args, const char* name) { return integer(args.at(name), "PositionOutOfRange", name); }

Integers integers(const Json& values, const char* kind, const char* name) {
    Integers found;
    for (const Json& value : values) found.push_back(integer(value, kind, name));
    return found;
}

Integers sequences_of(const Json& args) { return integers(args.at("sequences"), "SequenceNotFound", "sequences"); }

// The parameters of the rotary embedding, or nothing if the cache has none.
std::optional<Rotary> rotary_of(const Json& args, std::int64_t dim) {
    if (!args.contains("frequencies") || args.at("frequencies").is_null()) return std::nullopt;
    const Json& frequencies = args.at("frequencies");
    bool valid = frequencies.is_array() && !frequencies.empty() && static_cast<std::int64_t>(frequencies.size()) <= dim / 2;
    for (const Json& each : frequencies) valid = valid && each.is_number() && std::isfinite(each.get<double>());
    if (!valid) throw KVError("ConfigError", "frequencies: expected 1 to " + std::to_string(dim / 2) + " finite numbers, got " + frequencies.dump());
    const std::string layout = args.value("layout", "halves");
    if (layout != "halves" && layout != "pairs") throw KVError("ConfigError", "layout: expected halves or pairs, got " + layout);
    return Rotary{frequencies.get<std::vector<double>>(), layout == "pairs"};
}

Operations operations_of(std::shared_ptr<PagedCache> cache) {
    const PagedConfig& config = cache->config();
    const std::int64_t heads = config.num_kv_heads, dim = config.head_dim;

    const auto tokens_of = [=](const Json& args, const Shape& shape) {
        Array keys = array_of(args, "keys", shape), values = array_of(args, "values", keys.shape);
        return Tokens{std::move(keys.numbers), std::move(values.numbers), keys.shape[0]};
    };
    const auto pair = [=](const Tokens& tokens) {
        const Shape shape{tokens.count, heads, dim};
        return Json::array({sent(tokens.keys, shape, "float32"), sent(tokens.values, shape, "float32")});
    };
    const auto lengths = [=](const Json& args) {
        std::vector<std::int32_t> found;
        for (std::int64_t sequence : sequences_of(args)) {
            found.push_back(static_cast<std::int32_t>(cache->length(sequence, layer_of(args))));
        }
        return found;
    };
    return {
        {"num_free_blocks", [=](const Json&) -> Json { return cache->pool().num_free(); }},
        {"utilization", [=](const Json&) -> Json { return cache->pool().utilization(); }},
        {"create", [=](const Json&) -> Json { return cache->create(); }},
        {"drop", [=](const Json& args) -> Json {
             cache->drop(sequence_of(args));
             return nullptr;
         }},
        {"fork", [=](const Json& args) -> Json { return cache->fork(sequence_of(args)); }},
        {"truncate", [=](const Json& args) -> Json {
             cache->truncate(sequence_of(args), position_of(args, "length"));
             return nullptr;
         }},
        {"remove", [=](const Json& args) -> Json {
             const std::optional<Rotary> rotary = rotary_of(args, dim);
             cache->remove(sequence_of(args), position_of(args, "start"), position_of(args, "stop"), rotary ? &*rotary : nullptr);
             return nullptr;
         }},
        {"ensure_capacity", [=](const Json& args) -> Json {
             cache->ensure_capacity(sequence_of(args), position_of(args, "num_tokens"));
             return nullptr;
         }},
        {"write", [=](const Json& args) -> Json {
             const Tokens tokens = tokens_of(args, {ANY, heads, dim});
             cache->write(sequence_of(args), layer_of(args), position_of(args, "start"), tokens);
             return nullptr;
         }},
        {"append", [=](const Json& args) -> Json {
             const Integers sequences = sequences_of(args);
             const Tokens tokens = tokens_of(args, {static_cast<std::int64_t>(sequences.size()), heads, dim});
             in_range(layer_of(args), config.num_layers, "LayerOutOfRange", "layer");
             cache->append(sequences, layer_of(args), 1, tokens);
             return nullptr;
         }},
        {"append_step", [=](const Json& args) -> Json {
             const Integers sequences = sequences_of(args);
             const Shape shape{config.num_layers, static_cast<std::int64_t>(sequences.size()), heads, dim};
             cache->append(sequences, 0, config.num_layers, tokens_of(args, shape));
             return nullptr;
         }},
        {"read", [=](const Json& args) -> Json {
             const Integers positions = integers(args.at("positions"), "PositionOutOfRange", "positions");
             return pair(cache->read(sequence_of(args), layer_of(args), positions));
         }},
        {"gather", [=](const Json& args) -> Json { return pair(cache->gather(sequence_of(args), layer_of(args))); }},
        {"gather_batch", [=](const Json& args) -> Json {
             Tokens all;
             std::vector<std::int32_t> offsets{0};
             in_range(layer_of(args), config.num_layers, "LayerOutOfRange", "layer");
             for (std::int64_t sequence : sequences_of(args)) {
                 const Tokens tokens = cache->gather(sequence, layer_of(args));
                 all.keys.insert(all.keys.end(), tokens.keys.begin(), tokens.keys.end());
                 all.values.insert(all.values.end(), tokens.values.begin(), tokens.values.end());
                 all.count += tokens.count;
                 offsets.push_back(static_cast<std::int32_t>(all.count));
             }
             Json found = pair(all);
             found.push_back(sent(offsets, {static_cast<std::int64_t>(offsets.size())}, "int32"));
             return found;
         }},
        {"length", [=](const Json& args) -> Json { return cache->length(sequence_of(args), layer_of(args)); }},
        {"lengths", [=](const Json& args) -> Json {
             in_range(layer_of(args), config.num_layers, "LayerOutOfRange", "layer");
             return lengths(args);
         }},
        {"block_table", [=](const Json& args) -> Json { return cache->block_table(sequence_of(args), layer_of(args)); }},
        {"block_tables", [=](const Json& args) -> Json {
             const Integers sequences = sequences_of(args);
             in_range(layer_of(args), config.num_layers, "LayerOutOfRange", "layer");
             std::size_t most = 0;
             for (std::int64_t sequence : sequences) most = std::max(most, cache->block_table(sequence, layer_of(args)).size());
             std::vector<std::int32_t> tables(sequences.size() * most, -1);  // -1 pads shorter tables
             for (std::size_t i = 0; i < sequences.size(); ++i) {
                 const Integers& table = cache->block_table(sequences[i], layer_of(args));
                 std::copy(table.begin(), table.end(), tables.begin() + static_cast<std::ptrdiff_t>(i * most));
             }
             return sent(tables, {static_cast<std::int64_t>(sequences.size()), static_cast<std::int64_t>(most)}, "int32");
         }},
        {"slot_mapping", [=](const Json& args) -> Json {
             return cache->slot_mapping(sequence_of(args), layer_of(args), position_of(args, "start"), position_of(args, "count"));
         }},
        {"attend", [=](const Json& args) -> Json {
             const Array query = array_of(args, "query", {ANY, ANY, dim});
             return sent(cache->attend(sequence_of(args), layer_of(args), query.numbers, query.shape[1], args.at("scale")), query.shape,
                         "float32");
         }},
    };
}

Integers tokens_of(const Json& args) {
    Integers tokens = integers(args.at("tokens"), "TokenOutOfRange", "tokens");
    for (std::int64_t token : tokens) in_range(token, std::numeric_limits<std::int64_t>::max(), "TokenOutOfRange", "token");
    return tokens;
}

Prompt prompt_of(const Json& args) {
    Prompt prompt{args.value("salt", ""), args.value("adapter", ""), tokens_of(args), {}};
    for (const Json& item : args.value("media", Json::array())) {
        prompt.media.push_back({integer(item.at(0), "PositionOutOfRange", "media"), integer(item.at(1), "PositionOutOfRange", "media"), item.at(2)});
    }
    return prompt;
}

Operations operations_of(std::shared_ptr<PrefixCache> cache) {
    Operations operations = operations_of(std::static_pointer_cast<PagedCache>(cache));
    operations.merge(Operations{
        {"begin", [=](const Json& args) -> Json { return cache->begin(prompt_of(args)); }},
        {"match", [=](const Json& args) -> Json { return cache->match(prompt_of(args)); }},
        {"commit", [=](const Json& args) -> Json {
             cache->commit(sequence_of(args), tokens_of(args));
             return nullptr;
         }},
        {"reset", [=](const Json&) -> Json {
             cache->reset();
             return nullptr;
         }},
    });
    return operations;
}

Operations made(const std::string& family, const Json& args, bool frees_twice) {
    if (family == "blocks") return operations_of(std::make_shared<BlockPool>(size_of(args, "num_blocks", 0), frees_twice));
    const PagedConfig config = paged_config(args);
    if (family == "prefix") return operations_of(std::make_shared<PrefixCache>(config));
    return operations_of(std::make_shared<PagedCache>(config, std::make_unique<BlockPool>(config.num_blocks, frees_twice)));
}

}  // namespace

int main(int argc, char** argv) {
    const bool bug = argc == 3 && argv[1] == std::string("--bug") && argv[2] == std::string("double-free");
    if (argc > 1 && !bug) {
        std::cerr << "usage: harness [--bug double-free]\n";
        return 2;
    }
    struct Object {
        std::string family;
        Operations operations;
    };
    std::map<std::int64_t, Object> objects;  // by the id of the request that created them

    const auto perform = [&](const Json& request) -> Json {
        const std::string op = request.at("op");
        const Json& args = request.at("args");
        if (op == "hello") {
            objects.clear();  // a new sequence of calls starts
            return ABOUT;
        }
        const std::string family = op.substr(0, op.find('.')), name = op.substr(op.find('.') + 1);
        if (op == "blocks.new" || op == "paged.new" || op == "prefix.new") {
            objects[request.at("id")] = {family, made(family, args, bug)};
            return {{"handle", request.at("id")}};
        }
        const auto object = objects.find(request.value("on", 0));
        if (object == objects.end() || object->second.family != family || !object->second.operations.count(name)) {
            throw KVError("NotOffered", op);
        }
        return object->second.operations.at(name)(args);
    };

    std::ios::sync_with_stdio(false);
    for (std::string line; std::getline(std::cin, line);) {
        const Json request = Json::parse(line);
        if (request.at("op") == "bye") {
            std::cout << Json{{"id", request.at("id")}, {"ok", nullptr}} << std::endl;
            break;
        }
        Json reply = {{"id", request.at("id")}};
        try {
            reply["ok"] = perform(request);
        } catch (const KVError& error) {
            reply["error"] = {{"kind", error.kind}, {"message", error.what()}};
        } catch (const std::exception& error) {  // a missing argument, or no memory
            reply["error"] = {{"kind", "InternalError"}, {"message", error.what()}};
        }
        std::cout << reply << std::endl;
    }
}
