// A pool of numbered blocks. The number of references of a block is the number of tables that list it; a block without references is free.
#pragma once

#include <vector>

#include "sdk/kvref.hpp"

class BlockPool {
public:
    // frees_twice: the bug. A free block is added to the free list again and then gets two owners.
    BlockPool(std::int64_t num_blocks, bool frees_twice) : references_(num_blocks, 0), frees_twice_(frees_twice) {
        for (std::int64_t block = num_blocks; block-- > 0;) free_.push_back(block);
    }
    virtual ~BlockPool() = default;

    std::int64_t num_blocks() const { return static_cast<std::int64_t>(references_.size()); }
    virtual std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
    std::int64_t num_used() const { return num_blocks() - num_free(); }
    double utilization() const {
        return references_.empty() ? 0.0 : static_cast<double>(num_used()) / static_cast<double>(num_blocks());
    }

    std::int64_t allocate() {
        if (num_free() == 0) throw kvref::Error("OutOfBlocks", "out of blocks: 1 needed, 0 free");
        const std::int64_t block = take();
        references_[block] = 1;
        return block;
    }

    // Allocates `count` blocks, or none if there are not enough.
    std::vector<std::int64_t> allocate_many(std::int64_t count) {
        if (count < 0) throw kvref::Error("PositionOutOfRange", "count: expected at least 0, got " + std::to_string(count));
        if (count > num_free()) {
            throw kvref::Error("OutOfBlocks", "out of blocks: " + std::to_string(count) + " needed, " + std::to_string(num_free()) + " free");
        }
        std::vector<std::int64_t> taken;
        while (count-- > 0) taken.push_back(allocate());
        return taken;
    }

    void share(std::int64_t block) {
        if (references(block) == 0) refuse("share", block);
        ++references_[block];
    }

    void free(std::int64_t block) {
        if (references(block) == 0 && !frees_twice_) refuse("free", block);
        if (references_[block] > 0) --references_[block];
        if (references_[block] == 0) give_back(block);
    }

    std::int64_t references(std::int64_t block) const {
        if (block < 0 || block >= num_blocks()) refuse("references", block);
        return references_[block];
    }

protected:
    virtual std::int64_t take() {
        const std::int64_t block = free_.back();
        free_.pop_back();
        return block;
    }

    virtual void give_back(std::int64_t block) { free_.push_back(block); }

    std::vector<std::int64_t> references_;

private:
    [[noreturn]] static void refuse(const char* operation, std::int64_t block) {
        throw kvref::Error("BlockNotAllocated", std::string(operation) + ": block " + std::to_string(block) + " is not allocated");
    }

    std::vector<std::int64_t> free_;  // allocated from the end
    bool frees_twice_;
};
