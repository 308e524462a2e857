// A pool of numbered blocks: a block is either free or somebody's.
#pragma once

#include <vector>

#include "errors.hpp"

class BlockPool {
public:
    // frees_twice: the bug. A block that is free already goes on the free list again, and gets two owners.
    BlockPool(std::int64_t num_blocks, bool frees_twice) : held_(num_blocks, false), frees_twice_(frees_twice) {
        for (std::int64_t block = num_blocks; block-- > 0;) free_.push_back(block);
    }

    std::int64_t num_blocks() const { return static_cast<std::int64_t>(held_.size()); }
    std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
    std::int64_t num_used() const { return num_blocks() - num_free(); }
    double utilization() const { return held_.empty() ? 0.0 : static_cast<double>(num_used()) / static_cast<double>(num_blocks()); }

    std::int64_t allocate() {
        if (free_.empty()) throw KVError("OutOfBlocks", "allocate: expected a free block, got none");
        const std::int64_t block = free_.back();
        free_.pop_back();
        held_[block] = true;
        return block;
    }

    // So many blocks, or none of them.
    std::vector<std::int64_t> allocate_many(std::int64_t count) {
        if (count < 0) throw KVError("PositionOutOfRange", "count: expected at least 0, got " + std::to_string(count));
        if (count > num_free()) {
            throw KVError("OutOfBlocks", "allocate: expected " + std::to_string(count) + " free, got " + std::to_string(num_free()));
        }
        std::vector<std::int64_t> taken;
        while (count-- > 0) taken.push_back(allocate());
        return taken;
    }

    void free(std::int64_t block) {
        const bool known = block >= 0 && block < num_blocks();
        if (!known || (!held_[block] && !frees_twice_)) {
            throw KVError("BlockNotAllocated", "free: expected a block that is held, got " + std::to_string(block));
        }
        held_[block] = false;
        free_.push_back(block);
    }

private:
    std::vector<bool> held_;
    std::vector<std::int64_t> free_;  // the last one is handed out first
    bool frees_twice_;
};
