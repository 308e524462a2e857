// The prefix cache: a paged cache that finds cached blocks by their tokens. Tokens are compared, not hashed, so there are no collisions.
#pragma once

#include <list>
#include <string>

#include "paged_cache.hpp"

// A node of the prefix index: a tree in which the path from the root contains the blocks before this one.
struct Node {
    std::map<Integers, std::unique_ptr<Node>> children;  // by the tokens of the next block
    std::list<Integers> copies;                          // one block per layer
};

// Allocates cached blocks last, in the order in which they were freed (least recently used first).
class FindablePool : public BlockPool {
public:
    explicit FindablePool(std::int64_t num_blocks) : BlockPool(num_blocks, false) {}

    std::int64_t num_free() const override { return BlockPool::num_free() + static_cast<std::int64_t>(waiting_.size()); }
    bool findable(std::int64_t block) const { return parts_.count(block) != 0; }

    void make_findable(Node& node, const Integers& blocks) {
        for (const Integers& copy : node.copies) {
            if (copy == blocks) return;
        }
        node.copies.push_back(blocks);
        for (std::int64_t block : blocks) parts_[block].push_back({&node, std::prev(node.copies.end())});
    }

    // Adds a reference to a block that may be cached and free.
    void hold(std::int64_t block) {
        const auto place = places_.find(block);
        if (place != places_.end()) {
            waiting_.erase(place->second);
            places_.erase(place);
        }
        ++references_[block];
    }

    void forget() {
        parts_.clear();
        places_.clear();
        for (std::int64_t block : waiting_) BlockPool::give_back(block);
        waiting_.clear();
    }

protected:
    std::int64_t take() override {
        if (BlockPool::num_free() > 0) return BlockPool::take();
        const std::int64_t oldest = waiting_.front();
        waiting_.pop_front();
        places_.erase(oldest);
        lose(oldest);
        return oldest;
    }

    void give_back(std::int64_t block) override {
        if (findable(block)) {
            places_[block] = waiting_.insert(waiting_.end(), block);
        } else {
            BlockPool::give_back(block);
        }
    }

private:
    using Copy = std::list<Integers>::iterator;
    struct Part {
        Node* node;
        Copy copy;
    };

    // Removes all index entries that contain a block. Free blocks that were cached only for these entries become plain free blocks.
    void lose(std::int64_t block) {
        const std::vector<Part> parts = std::move(parts_[block]);
        parts_.erase(block);
        for (const Part& part : parts) {
            for (std::int64_t other : *part.copy) {
                if (other == block) continue;
                std::vector<Part>& rest = parts_[other];
                rest.erase(std::find_if(rest.begin(), rest.end(), [&](const Part& each) { return each.copy == part.copy; }));
                if (!rest.empty()) continue;
                parts_.erase(other);
                const auto place = places_.find(other);
                if (place == places_.end()) continue;
                waiting_.erase(place->second);
                places_.erase(place);
                BlockPool::give_back(other);
            }
            part.node->copies.erase(part.copy);
        }
    }

    std::list<std::int64_t> waiting_;
    std::map<std::int64_t, std::list<std::int64_t>::iterator> places_;  // of the evictable blocks
    std::map<std::int64_t, std::vector<Part>> parts_;                   // by block, the index entries that contain it
};

// Positions [start, stop) of a prompt are placeholders of `content`, such as the hash of an image.
struct MediaItem {
    std::int64_t start, stop;
    std::string content;
};

// A prompt: its tokens, and what else identifies its blocks.
struct Prompt {
    std::string salt, adapter;
    Integers tokens;
    std::vector<MediaItem> media;

    // The tokens of a block, followed by the media in it, relative to its first position.
    Integers block(std::int64_t start, std::int64_t stop, std::map<std::string, std::int64_t>& contents) const {
        Integers found(tokens.begin() + start, tokens.begin() + stop);
        for (const MediaItem& item : media) {
            if (item.start >= stop || item.stop <= start) continue;
            const std::int64_t content = contents.emplace(item.content, static_cast<std::int64_t>(contents.size())).first->second;
            found.insert(found.end(), {item.start - start, std::min(item.stop, stop) - start, content});
        }
        return found;
    }

    void check_media() const {
        std::int64_t end = 0;
        for (const MediaItem& item : media) {
            if (item.start < end || item.start >= item.stop || item.stop > static_cast<std::int64_t>(tokens.size())) {
                throw kvref::Error("PositionOutOfRange", "media: expected positions in [" + std::to_string(end) + ", " + std::to_string(tokens.size()) +
                                                        "), got [" + std::to_string(item.start) + ", " + std::to_string(item.stop) + ")");
            }
            end = item.stop;
        }
    }
};

class PrefixCache : public PagedCache {
public:
    explicit PrefixCache(const PagedConfig& config)
        : PagedCache(config, std::make_unique<FindablePool>(config.num_blocks)), findable_(static_cast<FindablePool*>(pool_.get())) {}

    // The hit: the number of leading tokens that `begin` finds cached, in whole blocks, and always fewer than all tokens.
    std::int64_t match(const Prompt& prompt) {
        prompt.check_media();
        return static_cast<std::int64_t>(find(prompt).size()) * config_.block_size;
    }

    // Creates a sequence with blocks for these tokens, of which the cached ones are reused.
    std::int64_t begin(const Prompt& prompt) {
        prompt.check_media();
        const Integers& tokens = prompt.tokens;
        const std::vector<const Integers*> found_blocks = find(prompt);
        const std::int64_t hit = static_cast<std::int64_t>(found_blocks.size());
        std::int64_t needed = (blocks_for(static_cast<std::int64_t>(tokens.size())) - hit) * config_.num_layers;
        for (const Integers* blocks : found_blocks) {
            for (std::int64_t block : *blocks) needed += pool_->references(block) == 0;  // evictable, so not available for other tokens
        }
        if (needed > pool_->num_free()) {
            throw kvref::Error("OutOfBlocks", "out of blocks: " + std::to_string(needed) + " needed, " + std::to_string(pool_->num_free()) + " free");
        }
        const std::int64_t sequence = create();
        Sequence& layers = found(sequence);
        for (const Integers* blocks : found_blocks) {
            for (std::size_t layer = 0; layer < layers.size(); ++layer) {
                findable_->hold((*blocks)[layer]);
                layers[layer].table.push_back((*blocks)[layer]);
                layers[layer].length += config_.block_size;
            }
        }
        ensure_capacity(sequence, static_cast<std::int64_t>(tokens.size()));
        Prompt& told = told_[sequence] = prompt;
        told.tokens.resize(hit * config_.block_size);
        return sequence;
    }

    // Commits the tokens of the first positions: each full block of them is cached.
    void commit(std::int64_t sequence, const Integers& tokens) {
        const std::int64_t written = shortest(sequence), size = config_.block_size;
        kvref::in_range(static_cast<std::int64_t>(tokens.size()), written + 1, "PositionOutOfRange", "len(tokens)");
        Prompt& told = told_.at(sequence);
        for (std::size_t at = 0; at < std::min(tokens.size(), told.tokens.size()); ++at) {
            if (tokens[at] != told.tokens[at]) {
                throw kvref::Error("TokenMismatch", "token at position " + std::to_string(at) + ": expected " +
                                                   std::to_string(told.tokens[at]) + ", committed before, got " + std::to_string(tokens[at]));
            }
        }
        if (tokens.size() > told.tokens.size()) told.tokens = tokens;
        Node* node = &roots_[{told.salt, told.adapter}];
        for (std::int64_t end = size; end <= static_cast<std::int64_t>(told.tokens.size()); end += size) {
            std::unique_ptr<Node>& child = node->children[told.block(end - size, end, contents_)];
            if (!child) child = std::make_unique<Node>();
            node = child.get();
            Integers blocks;
            for (const Layer& layer : found(sequence)) blocks.push_back(layer.table[end / size - 1]);
            findable_->make_findable(*node, blocks);
        }
    }

    void reset() {
        if (!sequences_.empty()) {
            throw kvref::Error("InUse", "cannot reset: " + std::to_string(sequences_.size()) + " sequences are live");
        }
        findable_->forget();
        roots_.clear();
    }

    std::int64_t create() override {
        const std::int64_t sequence = PagedCache::create();
        told_[sequence] = {};
        return sequence;
    }

    void drop(std::int64_t sequence) override {
        PagedCache::drop(sequence);
        told_.erase(sequence);
    }

    std::int64_t fork(std::int64_t sequence) override {
        const std::int64_t child = PagedCache::fork(sequence);
        told_[child] = told_.at(sequence);
        return child;
    }

    void write(std::int64_t sequence, std::int64_t layer, std::int64_t start, const Tokens& tokens) override {
        const std::int64_t before = length(sequence, layer);
        PagedCache::write(sequence, layer, start, tokens);
        if (tokens.count > 0 && start < before) forget_from(sequence, start);
    }

    void truncate(std::int64_t sequence, std::int64_t length) override {
        PagedCache::truncate(sequence, length);
        forget_from(sequence, length);
    }

    void remove(std::int64_t sequence, std::int64_t start, std::int64_t stop, const Rotary* rotary) override {
        PagedCache::remove(sequence, start, stop, rotary);
        if (start < stop) forget_from(sequence, start);
    }

protected:
    bool kept(std::int64_t block) const override { return findable_->findable(block); }

private:
    // From position `start` on, a sequence has no committed tokens and no media.
    void forget_from(std::int64_t sequence, std::int64_t start) {
        Prompt& told = told_.at(sequence);
        told.tokens.resize(std::min(told.tokens.size(), static_cast<std::size_t>(start)));
        while (!told.media.empty() && told.media.back().start >= start) told.media.pop_back();
        if (!told.media.empty()) told.media.back().stop = std::min(told.media.back().stop, start);
    }

    // The blocks of the longest cached prefix.
    std::vector<const Integers*> find(const Prompt& prompt) {
        std::vector<const Integers*> blocks;
        const auto root = roots_.find({prompt.salt, prompt.adapter});
        const Node* node = root == roots_.end() ? nullptr : &root->second;
        const std::int64_t size = config_.block_size;
        for (std::int64_t end = size; node && end < static_cast<std::int64_t>(prompt.tokens.size()); end += size) {
            const auto child = node->children.find(prompt.block(end - size, end, contents_));
            if (child == node->children.end() || child->second->copies.empty()) break;
            node = child->second.get();
            blocks.push_back(&node->copies.front());
        }
        return blocks;
    }

    FindablePool* findable_;
    std::map<std::pair<std::string, std::string>, Node> roots_;  // by salt and adapter
    std::map<std::string, std::int64_t> contents_;               // the numbers of the contents of media
    std::map<std::int64_t, Prompt> told_;                        // by sequence: its committed tokens, and its label
};
