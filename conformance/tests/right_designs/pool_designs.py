"""Block pools with other free lists."""

from collections import deque

from .simple_paged import BLOCKS, POSITION, require_sizes

NOT_ALLOCATED = type("BlockNotAllocated", (Exception,), {})


class Pool:
    """references: block -> its number of references, for allocated blocks."""

    def __init__(self, num_blocks):
        require_sizes(0, num_blocks=num_blocks)
        self.num_blocks, self.references_of, self.waiting = int(num_blocks), {}, []
        self.free_list = deque(range(self.num_blocks))

    num_used = property(lambda self: len(self.references_of))
    num_free = property(lambda self: self.num_blocks - len(self.references_of))
    utilization = property(lambda self: self.num_used / self.num_blocks if self.num_blocks else 0.0)

    def take(self):
        return self.free_list.popleft()

    def give_back(self, block):
        self.free_list.append(block)

    def allocate(self):
        return self.allocate_many(1)[0]

    def allocate_many(self, count):
        if count < 0:
            raise POSITION(count)
        if count > self.num_free:
            raise BLOCKS(count)
        blocks = [self.take() for _ in range(count)]
        self.references_of |= dict.fromkeys(blocks, 1)
        return blocks

    def share(self, block):
        self.require(block)
        self.references_of[block] += 1

    def free(self, block):
        self.require(block)
        self.references_of[block] -= 1
        if not self.references_of[block]:
            del self.references_of[block]
            self.give_back(int(block))

    def references(self, block):
        if not 0 <= block < self.num_blocks:
            raise NOT_ALLOCATED(block)
        return self.references_of.get(block, 0)

    def require(self, block):
        if block not in self.references_of:
            raise NOT_ALLOCATED(block)


class LinkedList(Pool):
    """Each free block stores the number of the next one, as a free list in the memory of the blocks does."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.next, self.first = list(range(1, self.num_blocks + 1)), 0

    def take(self):
        block, self.first = self.first, self.next[self.first]
        return block

    def give_back(self, block):
        self.next[block], self.first = self.first, block


class Buddies(Pool):
    """Free runs of blocks, split and joined like those of a buddy allocator; tuples as results."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.runs = [(0, self.num_blocks)] if num_blocks else []

    def take(self):
        start, stop = min(self.runs, key=lambda run: run[1] - run[0])
        self.runs.remove((start, stop))
        middle = (start + stop) // 2
        self.runs += [run for run in ((start, middle), (middle + 1, stop)) if run[0] < run[1]]
        return middle

    def give_back(self, block):
        before = next((run for run in self.runs if run[1] == block), (block, block))
        after = next((run for run in self.runs if run[0] == block + 1), (block + 1, block + 1))
        self.runs = [run for run in self.runs if run not in (before, after)] + [(before[0], after[1])]

    def allocate_many(self, count):
        return tuple(super().allocate_many(count))


class WaitsUntilSettle(Pool):
    """A block without references is free after the next `settle`."""

    num_free = property(lambda self: len(self.free_list))
    num_used = property(lambda self: self.num_blocks - len(self.free_list))

    def give_back(self, block):
        self.waiting.append(block)

    def settle(self):
        self.free_list.extend(self.waiting)
        self.waiting.clear()


LIMITS = {"WaitsUntilSettle": {"settle": True}}
DESIGNS = (Pool, LinkedList, Buddies, WaitsUntilSettle)
