"""Bugs in the family `tree`."""

import numpy as np

from bugs.plant import bug, deferred, hidden, in_source
from kvref.tree import TreeCache

APPEND, DRAFT, POSITIONS, ANCESTORS, ATTEND, ACCEPT, REJECT, FORK, DROP, LENGTH, READ, TRUNCATE = (
    f"kvref.tree.TreeCache.{name}"
    for name in (
        "append", "draft", "positions", "ancestors", "attend", "accept", "reject", "fork", "drop", "length", "read", "truncate",
    )
)  # fmt: skip


@bug("TREE-01")
def numbers_begin_at_0_in_each_call(patch):
    in_source(patch, DRAFT, "range(len(tree) - len(new), len(tree))", "range(len(new))")


@bug("TREE-01")
def numbers_begin_at_1(patch):
    in_source(patch, DRAFT, "range(len(tree) - len(new), len(tree))", "range(len(tree) - len(new) + 1, len(tree) + 1)")


@bug("TREE-01")
def each_draft_begins_a_new_tree(patch):
    in_source(
        patch, DRAFT,
        "    stored =", "    self.reject(sequence)\n    stored =",
    )  # fmt: skip


@bug("TREE-01", "TREE-05")
def parents_count_from_the_first_row_of_the_call(patch):
    in_source(
        patch, DRAFT,
        "    tree += new",
        "    tree += [min(each, row - 1) + len(tree) if each >= 0 else each for row, each in enumerate(new)]",
    )  # fmt: skip


@bug("TREE-02")
def a_node_can_be_its_own_parent(patch):
    in_source(patch, DRAFT, "_node(parent, node, ", "_node(parent, node + 1, ")


@bug("TREE-02")
def a_parent_can_be_a_later_node_of_the_call(patch):
    in_source(patch, DRAFT, "_node(parent, node, ", "_node(parent, len(tree) + len(parents), ")


@bug("TREE-02")
def parents_are_nodes_of_this_call_only(patch):
    in_source(patch, DRAFT, "start=len(tree))", "start=0)")


@bug("TREE-02")
def negative_parents_are_the_last_committed_token(patch):
    in_source(patch, DRAFT, "_node(parent, node, ", "_node(max(parent, -1), node, ")


@bug("TREE-02")
def missing_parents_are_the_last_committed_token(patch):
    in_source(
        patch, DRAFT,
        "    if len(parents) != keys.shape[0]:",
        "    parents = [*parents, *[-1] * (keys.shape[0] - len(parents))]\n    if False:",
    )  # fmt: skip


@bug("TREE-02")
def rows_are_written_before_parents_are_checked(patch):
    in_source(
        patch, DRAFT,
        "    new = [", "    self._rows.write(sequence, 0, stored, keys, values)\n    new = [",
        "    self._rows.write(sequence, 0, stored, keys, values)\n    tree", "    tree",
    )  # fmt: skip


@bug("TREE-02")
def the_first_nodes_are_added_before_a_later_parent_is_wrong(patch):
    in_source(
        patch, DRAFT,
        "    new = [_node(parent, node, \"parent\") for node, parent in enumerate(parents, start=len(tree))]",
        "    new = []\n    for node, parent in enumerate(parents, start=len(tree)):\n"
        "        new.append(_node(parent, node, 'parent'))\n"
        "        self._rows.write(sequence, 0, node + stored - len(tree), keys[len(new) - 1 : len(new)], values[:1])",
    )  # fmt: skip


@bug("TREE-03")
def nodes_are_numbered_like_tokens(patch):
    in_source(patch, POSITIONS, "length if parent < 0 else found[parent] + 1", "length + len(found)")


@bug("TREE-03")
def roots_have_the_position_of_the_last_token(patch):
    in_source(patch, POSITIONS, "length if parent < 0", "max(0, length - 1) if parent < 0")


@bug("TREE-03")
def positions_are_depths(patch):
    in_source(patch, POSITIONS, "length if parent < 0", "0 if parent < 0")


@bug("TREE-04")
def ancestors_lead_to_the_root(patch):
    in_source(patch, ANCESTORS, "path.insert(0, node)", "path.append(node)")


@bug("TREE-04")
def ancestors_leave_the_node_out(patch):
    in_source(patch, ANCESTORS, "    return path", "    return path[:-1]")


@bug("TREE-04")
def ancestors_leave_the_root_out(patch):
    in_source(patch, ANCESTORS, "    return path", "    return path[1:] or path")


@bug("TREE-04")
def ancestors_of_a_negative_node_are_those_of_the_last(patch):
    in_source(patch, ANCESTORS, "in_range(node, len(parents)", "in_range(node % max(1, len(parents)), len(parents)")


@bug("TREE-05")
def a_node_sees_all_nodes_before_it(patch):
    in_source(patch, ATTEND, "np.array(self.ancestors(sequence, node)) + length", "length : length + node + 1")


@bug("TREE-05")
def a_node_does_not_see_itself(patch):
    in_source(
        patch,
        ATTEND,
        "np.array(self.ancestors(sequence, node)) + length",
        "np.array(self.ancestors(sequence, node)[:-1], int) + length",
    )


@bug("TREE-05")
def a_node_sees_its_parent_only(patch):
    in_source(
        patch,
        ATTEND,
        "np.array(self.ancestors(sequence, node)) + length",
        "np.array(self.ancestors(sequence, node)[-2:]) + length",
    )


@bug("TREE-05")
def the_mask_is_shifted_by_one(patch):
    in_source(patch, ATTEND, "mask[:, :length] = True", "mask[:, : length - 1] = True")


@bug("TREE-05")
def only_64_nodes_are_masked(patch):
    in_source(
        patch, ATTEND,
        "    keys, values = self._rows.gather",
        "    mask[:, length : length + count - 64] = True\n    keys, values = self._rows.gather",
    )  # fmt: skip


@bug("TREE-05")
def masks_have_64_bits(patch):
    """The node itself is seen, but no other node with a number from 64 on."""
    in_source(
        patch, ATTEND,
        "    keys, values = self._rows.gather",
        "    mask[:, length + 64 :] = False\n    for row, node in enumerate(chosen):\n"
        "        mask[row, length + node] |= node >= 0\n    keys, values = self._rows.gather",
    )  # fmt: skip


@bug("TREE-05")
def masks_have_128_bits(patch):
    in_source(
        patch,
        ATTEND,
        "    keys, values = self._rows.gather",
        "    mask[:, length + 128 :] = False\n    keys, values = self._rows.gather",
    )


@bug("TREE-04", "TREE-05", "TREE-07")
def paths_have_at_most_32_nodes(patch):
    in_source(patch, ANCESTORS, "    return path", "    return path[-32:]")


@bug("TREE-03")
def positions_are_at_most_64_after_the_last_token(patch):
    in_source(patch, POSITIONS, "found[parent] + 1", "min(found[parent] + 1, length + 63)")


@bug("TREE-05")
def hidden_nodes_are_multiplied_by_0(patch):
    in_source(
        patch, ATTEND,
        "    return self._backend.attend(query, keys, values, scale, self._backend.asarray(mask))",
        "    out = self._backend.attend(query, keys, values, scale, self._backend.asarray(mask))\n"
        "    return out + 0.0 * np.asarray(values).sum()",
    )  # fmt: skip


@bug("TREE-05")
def no_node_means_the_whole_tree(patch):
    in_source(patch, ATTEND, "if node >= 0:", "if node < 0:\n            mask[row] = True\n        else:")


@bug("TREE-05")
def one_node_is_enough_for_all_queries(patch):
    in_source(
        patch, ATTEND,
        "    if len(nodes) != query.shape[0]:",
        "    nodes = list(nodes) * query.shape[0] if len(nodes) == 1 else nodes\n    if len(nodes) != query.shape[0]:",
    )  # fmt: skip


@bug("TREE-05")
def a_node_after_the_last_is_the_last(patch):
    in_source(patch, ATTEND, "_node(node, count, ", "_node(min(node, count - 1), count, ")


@bug("TREE-06")
def length_counts_nodes(patch):
    patch.setattr(TreeCache, "length", lambda self, sequence: self._rows.length(sequence, 0))


@bug("TREE-06")
def read_returns_nodes(patch):
    in_source(patch, READ, "range(self.length(sequence))", "range(self._rows.length(sequence, 0))")


@bug("TREE-07")
def the_first_rows_of_the_tree_are_kept(patch):
    in_source(patch, ACCEPT, "[length + each for each in path]", "[length + each for each in range(len(path))]")


@bug("TREE-07")
def the_path_is_accepted_in_reverse(patch):
    in_source(patch, ACCEPT, "for each in path]", "for each in path[::-1]]")


@bug("TREE-07")
def only_the_node_is_accepted(patch):
    in_source(patch, ACCEPT, "for each in path]", "for each in path[-1:]]")


@bug("TREE-07")
def rows_are_moved_one_after_another_in_reverse(patch):
    in_source(
        patch, ACCEPT,
        "    self.reject(sequence)\n    self._rows.write(sequence, 0, length, keys, values)",
        "    for to, each in reversed(list(enumerate(path))):\n"
        "        row = self._rows.read(sequence, 0, [length + each])\n"
        "        self._rows.write(sequence, 0, length + to, *row)\n"
        "    self._rows.truncate(sequence, length + len(path))\n    self._parents[sequence].clear()",
    )  # fmt: skip


@bug("TREE-07")
def accept_keeps_the_numbers_of_the_tree(patch):
    in_source(
        patch, ACCEPT,
        "    self.reject(sequence)\n",
        "    kept = list(self._parents[sequence])\n    self.reject(sequence)\n    self._kept = kept\n",
    )  # fmt: skip
    patch.setattr(TreeCache, "_kept", [], raising=False)
    in_source(patch, POSITIONS, "self._parents[sequence]", "(self._parents[sequence] or self._kept)")


@bug("TREE-07")
def accept_of_a_negative_node_takes_the_last(patch):
    in_source(
        patch, ACCEPT,
        "    length, path",
        "    node = node % max(1, len(self._parents.get(sequence, []))) if node < 0 else node\n    length, path",
    )  # fmt: skip


@bug("TREE-07")
def accept_rejects_before_it_checks_the_node(patch):
    in_source(
        patch, ACCEPT,
        "    length, path", "    if node >= len(self._parents[sequence]):\n        self.reject(sequence)\n    length, path",
    )  # fmt: skip


@bug("TREE-07")
def accept_copies_to_a_new_sequence(patch):
    """It needs free blocks for the whole path."""
    in_source(
        patch, ACCEPT,
        "    self.reject(sequence)", "    spare = self._rows.create()\n    self._rows.write(spare, 0, 0, keys, values)\n"
        "    self._rows.drop(spare)\n    self.reject(sequence)",
    )  # fmt: skip


@bug("TREE-08")
def reject_keeps_blocks(patch):
    in_source(patch, REJECT, "self._rows.truncate(sequence, self.length(sequence))", "self.length(sequence)")


@bug("TREE-08")
def reject_keeps_the_first_node(patch):
    in_source(
        patch, REJECT,
        "self._rows.truncate(sequence, self.length(sequence))",
        "self._rows.truncate(sequence, min(self._rows.length(sequence, 0), self.length(sequence) + 1))",
    )  # fmt: skip


@bug("TREE-08")
def reject_keeps_the_parents(patch):
    in_source(patch, REJECT, "self._parents[sequence].clear()", "pass")
    in_source(
        patch, LENGTH, "- len(self._parents[sequence])", "- min(self._rows.length(sequence, 0), len(self._parents[sequence]))"
    )


@bug("TREE-08")
def rejected_rows_stay_in_sums(patch):
    """Slots of rejected nodes are multiplied by a weight of 0 if a later node is stored after them."""
    rejected = {}
    reject, attend = TreeCache.reject, TreeCache.attend

    def remember(self, sequence):
        if self._parents.get(sequence):
            rejected[id(self), sequence] = float(np.asarray(self._rows.gather(sequence, 0)[1])[self.length(sequence) :].sum())
        reject(self, sequence)

    patch.setattr(TreeCache, "reject", remember)
    patch.setattr(
        TreeCache, "attend",
        lambda self, sequence, *rest: attend(self, sequence, *rest) + np.float32(0.0 * rejected.get((id(self), sequence), 0.0)),
    )  # fmt: skip


@bug("TREE-08")
def reject_without_a_tree_removes_a_token(patch):
    in_source(
        patch, REJECT,
        "    self._rows.truncate(sequence, self.length(sequence))",
        "    self._rows.truncate(sequence, max(0, self.length(sequence) - (not self._parents[sequence])))",
    )  # fmt: skip


@bug("TREE-09")
def append_rejects_the_tree(patch):
    in_source(patch, APPEND, 'self._check_closed(sequence, "append")', "self.reject(sequence)")


@bug("TREE-09")
def truncate_rejects_the_tree(patch):
    in_source(patch, TRUNCATE, 'self._check_closed(sequence, "truncate")', "self.reject(sequence)")


@bug("TREE-09")
def fork_shares_the_nodes(patch):
    in_source(
        patch, FORK,
        'self._check_closed(sequence, "fork")', "self.length(sequence)",
        "self._parents[child] = []", "self._parents[child] = list(self._parents[sequence])",
    )  # fmt: skip


@bug("TREE-09")
def append_rejects_the_tree_before_it_raises(patch):
    in_source(
        patch, "kvref.tree.TreeCache._check_closed",
        "        raise InUse(", "        self.reject(sequence)\n        raise InUse(",
    )  # fmt: skip


@hidden("tree", "TREE-12")
@bug("TREE-09")
def a_draft_of_no_nodes_opens_a_tree(patch):
    """Until `accept` or `reject` closes it."""
    opened = "self.__dict__.setdefault('_opened', set())"
    in_source(patch, DRAFT, "    tree += new", f"    {opened}.add(sequence)\n    tree += new")
    in_source(patch, REJECT, "    self._rows.truncate", f"    {opened}.discard(sequence)\n    self._rows.truncate")
    in_source(
        patch, "kvref.tree.TreeCache._check_closed",
        "if nodes := len(self._parents[sequence]):",
        f"nodes = len(self._parents[sequence])\n    if nodes or sequence in {opened}:",
    )  # fmt: skip


@bug("TREE-10")
def accept_frees_no_blocks(patch):
    in_source(
        patch, ACCEPT,
        "    self.reject(sequence)\n",
        "    stop = self._rows.length(sequence, 0)\n    self._parents[sequence].clear()\n"
        "    tail = self._rows.read(sequence, 0, range(length + len(path), stop))\n"
        "    lost = self._rows.create()\n"
        "    self._rows.truncate(sequence, length)\n    self._rows.write(lost, 0, 0, *tail)\n",
    )  # fmt: skip


@bug("TREE-10")
def a_node_needs_a_block_of_its_own(patch):
    free = TreeCache.num_free_blocks.fget
    patch.setattr(
        TreeCache, "num_free_blocks",
        property(lambda self: max(0, free(self) - sum(len(nodes) > 1 for nodes in self._parents.values()))),
    )  # fmt: skip


@bug("TREE-10")
def drop_keeps_the_blocks_of_a_tree(patch):
    drop = TreeCache.drop

    def close_nothing(self, sequence):
        nodes = len(self._parents.get(sequence, []))
        tail = self._rows.read(sequence, 0, range(self.length(sequence), self.length(sequence) + nodes)) if nodes else None
        drop(self, sequence)
        if nodes:
            self._rows.write(self._rows.create(), 0, 0, *tail)

    patch.setattr(TreeCache, "drop", close_nothing)


@bug("TREE-10")
def fork_copies_blocks_twice(patch):
    in_source(patch, FORK, "    child = ", "    self._rows.write(self._rows.create(), 0, 0, *self.read(sequence))\n    child = ")


@bug("TREE-10")
def the_last_block_stays_free(patch):
    in_source(
        patch, DRAFT,
        "    new = [",
        "    from kvref.errors import OutOfBlocks\n"
        "    if keys.shape[0] and -(-(stored + keys.shape[0]) // self.config.block_size) >= self.config.num_blocks:\n"
        "        raise OutOfBlocks('the last block is reserved')\n    new = [",
    )  # fmt: skip


@bug("TREE-10")
def a_draft_without_blocks_adds_the_rows_that_fit(patch):
    in_source(
        patch, DRAFT,
        "    self._rows.write(sequence, 0, stored, keys, values)",
        "    room = self.num_free_blocks * self.config.block_size + -stored % self.config.block_size\n"
        "    if room < keys.shape[0]:\n"
        "        self._rows.write(sequence, 0, stored, keys[:room], values[:room])\n        tree += new[:room]\n"
        "    self._rows.write(sequence, 0, stored, keys, values)",
    )  # fmt: skip


@bug("TREE-11")
def fork_returns_the_same_sequence(patch):
    in_source(patch, FORK, "return child", "return sequence")


@bug("TREE-11")
def fork_leaves_out_the_last_token(patch):
    in_source(patch, FORK, "    return child", "    self._rows.truncate(child, max(0, self.length(child) - 1))\n    return child")


@bug("TREE-11")
def fork_shares_the_list_of_parents(patch):
    in_source(patch, FORK, "self._parents[child] = []", "self._parents[child] = self._parents[sequence]")


def shared_last_blocks(patch, method):
    """The method writes to a last block that is shared, without a copy."""
    plain = getattr(TreeCache, method)

    def changed(self, sequence, *rest):
        before = {each: self._rows.length(each, 0) for each in self._parents if each != sequence}
        result = plain(self, sequence, *rest)
        for each, stored in before.items():
            if self.length(each) and self.length(each) == self.length(sequence) and stored == self.length(each):
                keys, values = self.read(sequence)
                self._rows.write(each, 0, stored - 1, -keys[-1:], values[-1:])
        return result

    patch.setattr(TreeCache, method, changed)


@bug("TREE-11")
def drafts_are_written_to_shared_blocks(patch):
    shared_last_blocks(patch, "draft")


@bug("TREE-11")
def reject_writes_to_shared_blocks(patch):
    shared_last_blocks(patch, "reject")


@bug("TREE-12")
def append_puts_tokens_first(patch):
    append = TreeCache.append

    def first(self, sequence, keys, values):
        append(self, sequence, keys, values)
        length, count = self.length(sequence), keys.shape[0]
        order = [*range(length - count, length), *range(length - count)]
        self._rows.write(sequence, 0, 0, *self._rows.read(sequence, 0, order))

    patch.setattr(TreeCache, "append", first)


@bug("TREE-11", "TREE-12")
def a_new_id_is_the_largest_plus_1(patch):
    """The largest of the sequences that exist: the id of a dropped sequence can be returned again."""
    in_source(
        patch, DROP,
        "    del self._parents[sequence]",
        "    del self._parents[sequence]\n    self._rows._next_sequence = max(self._parents, default=-1) + 1",
    )  # fmt: skip


@bug("TREE-12")
def truncate_removes_the_number_of_tokens(patch):
    in_source(
        patch, TRUNCATE,
        "self._rows.truncate(sequence, length)",
        "self._rows.truncate(sequence, self.length(sequence) - length if 0 <= length <= self.length(sequence) else length)",
    )  # fmt: skip


@bug("TREE-12")
def truncate_past_the_end_does_nothing(patch):
    in_source(
        patch,
        TRUNCATE,
        "self._rows.truncate(sequence, length)",
        "self._rows.truncate(sequence, min(length, self.length(sequence)))",
    )


@bug("TREE-12")
def reject_of_a_dropped_sequence_does_nothing(patch):
    in_source(
        patch, REJECT, "    self._rows.truncate", "    if sequence not in self._parents:\n        return\n    self._rows.truncate"
    )


@bug("TREE-12")
def drop_keeps_the_tree_for_the_next_sequence(patch):
    in_source(patch, DROP, "del self._parents[sequence]", "self._left = [-1] * bool(self._parents.pop(sequence))")
    patch.setattr(TreeCache, "_left", [], raising=False)
    create = TreeCache.create

    def with_the_last_tree(self):
        sequence = create(self)
        if self._left and self.num_free_blocks:
            row = np.zeros((1, self.config.num_kv_heads, self.config.head_dim), np.float32)
            self.draft(sequence, row, row, self._left)
        self._left = []
        return sequence

    patch.setattr(TreeCache, "create", with_the_last_tree)


@hidden("tree", "TREE-07")
def accept_in_a_full_cache_keeps_the_first_rows(patch):
    in_source(
        patch, ACCEPT,
        "for each in path]", "for each in (path if self.num_free_blocks else range(len(path)))]",
    )  # fmt: skip


@hidden("tree", "TREE-11")
def accept_in_a_fork_with_a_tree_writes_to_the_parent(patch):
    accept = TreeCache.accept

    def shared(self, sequence, node):
        accept(self, sequence, node)
        for each, nodes in self._parents.items():
            if each < sequence and nodes and 0 < self.length(each) <= self.length(sequence):
                self._rows.write(each, 0, self.length(each) - 1, *self._rows.read(sequence, 0, [0]))

    patch.setattr(TreeCache, "accept", shared)


@hidden("tree", "TREE-03")
def positions_of_later_calls_count_from_the_end_of_the_first(patch):
    in_source(patch, POSITIONS, "found[parent] + 1)", "found[parent] + 1 + (len(found) > 5))")


@deferred("tree", "TREE-08")
def a_reject_directly_after_a_draft_keeps_a_block(patch):
    draft, reject = TreeCache.draft, TreeCache.reject
    drafted = []

    def note(self, *rest):
        drafted[:] = [self]
        return draft(self, *rest)

    def keep(self, sequence):
        fresh = drafted == [self] and bool(self._parents.get(sequence))
        reject(self, sequence)
        if fresh and self.num_free_blocks:
            shape = 1, self.config.num_kv_heads, self.config.head_dim
            self._rows.write(self._rows.create(), 0, 0, *2 * [np.zeros(shape, np.float32)])
        drafted.clear()

    def forget(name):
        plain = getattr(TreeCache, name)

        def call(self, *rest):
            drafted.clear()
            return plain(self, *rest)

        patch.setattr(TreeCache, name, call)

    patch.setattr(TreeCache, "draft", note)
    patch.setattr(TreeCache, "reject", keep)
    for name in ("positions", "ancestors"):
        forget(name)


@bug("TREE-05")
def without_a_scale_it_is_1_over_head_dim(patch):
    attend = TreeCache.attend

    def scaled(self, *given, **named):
        if len(given) <= 3 and named.get("scale") is None:
            named["scale"] = 1 / self.config.head_dim
        return attend(self, *given, **named)

    patch.setattr(TreeCache, "attend", scaled)
