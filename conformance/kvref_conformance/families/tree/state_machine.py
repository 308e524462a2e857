"""The state machine of the family `tree`, and the states that it should reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.tree.model import Tree, TreeSequence
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    LAST_INDEX,
    TOKEN_COUNT,
    TRUNCATION,
    FamilyStateMachine,
    choose_one,
    make_pair,
)
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state

UNKNOWN = 10**6  # an id that was never returned
# How parents are chosen: by these numbers in turn, modulo the number of nodes that can be one. -1: the last committed token.
SHAPES = st.lists(st.sampled_from((-1, 0, 1, 2, 3, 5, -1)), max_size=9)
WRONG_PARENTS = ("later", "own", "negative", "few", "many")


class TreeStateMachine(FamilyStateMachine):
    family = "tree"

    @initialize(
        heads=st.integers(1, 2), dim=st.sampled_from((1, 3)), size=st.sampled_from((2, 1, 3, 4)),
        blocks=st.sampled_from((12, 6, 30, 4, 20, 2)),
    )  # fmt: skip
    def new(self, heads: int, dim: int, size: int, blocks: int) -> None:
        self.make_object(num_blocks=blocks, num_kv_heads=heads, head_dim=dim, block_size=size)
        if self.objects:
            self.call("create", self.objects[0])

    @property
    def model(self) -> Tree:
        model = self.models[self.objects[0]]
        assert isinstance(model, Tree)
        return model

    def sequence(self, index: int) -> int:
        """The id of a sequence; for LAST_INDEX, or if there is none, one that was dropped, or never existed."""
        gone = choose_one(self.model.ids - self.model.sequences.keys(), index)
        found = None if index == LAST_INDEX else choose_one(self.model.sequences, index)
        return found if found is not None else UNKNOWN if gone is None else gone

    def state_of(self, sequence: int) -> TreeSequence:
        return self.model.sequences.get(sequence, TreeSequence(-1))

    # Steps that rules share.

    def append_to(self, sequence: int, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.model.row), kind)
        self.call("append", self.objects[0], sequence=sequence, keys=keys, values=values)

    def draft_to(self, sequence: int, shape: list[int], kind: str, wrong: str = "") -> None:
        first, parents = len(self.state_of(sequence).nodes), list[int]()
        for number in shape:
            count = first + len(parents)
            parents.append(-1 if number < 0 or not count else count - 1 - number % count)
        keys, values = make_pair(self.source, (len(shape), *self.model.row), kind)
        if wrong in ("later", "own", "negative"):
            parents[-1:] = [{"later": first + len(shape), "own": first + len(shape) - 1, "negative": -2}[wrong]]
        elif wrong:
            parents = parents[1:] if wrong == "few" else [*parents, -1]
        self.call("draft", self.objects[0], sequence=sequence, keys=keys, values=values, parents=parents)

    def node(self, sequence: int, index: int) -> int:
        """A node of the sequence; for LAST_INDEX, or without a tree, one that does not exist."""
        count = len(self.state_of(sequence).nodes)
        return count if index == LAST_INDEX or not count else count - 1 - index % count

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        on, self.edited = self.objects[0], self.sequence(which)

        def continue_with(sequence: int | None) -> None:
            self.edited = self.edited if sequence is None else sequence

        def call(name: str, **args: Any) -> Any:
            return self.call(name, on, sequence=self.edited, **args)

        def drop(number: int) -> None:
            call("drop")
            self.edited = self.sequence(number)

        def turn_to(with_tree: bool) -> None:
            """Continue with a relative with or without an open tree, if there is one and the sequence is not such a one."""
            held = self.state_of(self.edited)
            others = {id: each for id, each in self.model.sequences.items() if each.relatives == held.relatives}
            if bool(held.nodes) != with_tree:
                self.edited = next((id for id, each in others.items() if bool(each.nodes) == with_tree), self.edited)

        def close(number: int) -> None:
            turn_to(False)
            if self.state_of(self.edited).nodes:
                call("reject") if number % 2 else call("accept", node=self.node(self.edited, number))

        def accept(number: int) -> None:
            turn_to(True)
            if not self.state_of(self.edited).nodes:
                self.draft_to(self.edited, [-1, 0, 1], "uneven")
            call("accept", node=self.node(self.edited, number))

        def truncate(number: int) -> None:
            close(number)
            call("truncate", length=max(0, len(self.state_of(self.edited).tokens) - (1, 2, 3, 0, 5, 8, 1, 99)[number]))

        def append(number: int) -> None:
            close(number)
            self.append_to(self.edited, 1 + number % 4, "uneven")

        def fork(number: int) -> None:
            close(number)
            forked = call("fork")
            continue_with(forked if number % 2 else None)

        return {
            "create": lambda number: continue_with(self.call("create", on)),
            "append": append,
            "draft": lambda number: self.draft_to(self.edited, [number - 1, -1, 0, 2][: 1 + number % 4], "uneven"),
            "accept": accept,
            "reject": lambda number: call("reject"),
            "truncate": truncate,
            "fork": fork,
            "drop": drop,
        }

    edit_more = FamilyStateMachine.edit_in_a_row  # a second rule makes edits more frequent

    # Rules.

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds())
    def append(self, index: int, count: int, kind: str) -> None:
        self.append_to(self.sequence(index), count, kind)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2), drafts=st.booleans())
    def add_wrong_arrays(self, index: int, wrong: int, side: int, drafts: bool) -> None:
        keys, values = self.source.wrong_pair((2, *self.model.row), wrong, side)
        name, more = ("draft", {"parents": [-1, -1]}) if drafts else ("append", {})
        self.call(name, self.objects[0], sequence=self.sequence(index), keys=keys, values=values, **more)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT)
    def create(self, count: int) -> None:
        sequence = self.call("create", self.objects[0])
        if sequence is not None:
            self.append_to(sequence, count, "uneven")

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, shape=SHAPES, kind=row_kinds())
    def draft(self, index: int, shape: list[int], kind: str) -> None:
        self.draft_to(self.sequence(index), shape, kind)

    draft_more = draft_again = draft

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, shape=SHAPES, wrong=st.sampled_from(WRONG_PARENTS))
    def draft_wrongly(self, index: int, shape: list[int], wrong: str) -> None:
        self.draft_to(self.sequence(index), shape, "uneven", wrong)

    @precondition(lambda self: self.objects)
    @rule(
        index=ANY_INDEX, node=st.sampled_from((*range(9), LAST_INDEX)), later=st.sampled_from(("", "append", "draft", "reject"))
    )
    def accept(self, index: int, node: int, later: str) -> None:
        """Accept a node, then begin the next step."""
        sequence = self.sequence(index)
        self.call("accept", self.objects[0], sequence=sequence, node=self.node(sequence, node))
        if later == "append":
            self.append_to(sequence, 1, "uneven")
        elif later == "draft":
            self.draft_to(sequence, [-1, -1, 0], "uneven")
        elif later:
            self.call("reject", self.objects[0], sequence=sequence)

    accept_more = accept

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, shape=SHAPES, kind=row_kinds())
    def reject(self, index: int, shape: list[int], kind: str) -> None:
        """Reject a tree, then draft another and attend to it."""
        sequence = self.sequence(index)
        self.call("reject", self.objects[0], sequence=sequence)
        self.draft_to(sequence, shape, kind)
        self.attend_to(sequence, [0, 3, -1], 1, "uneven")

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, back=TRUNCATION, count=TOKEN_COUNT, kind=row_kinds())
    def truncate(self, index: int, back: int, count: int, kind: str) -> None:
        sequence = self.sequence(index)
        self.call("truncate", self.objects[0], sequence=sequence, length=len(self.state_of(sequence).tokens) - back)
        self.append_to(sequence, count, kind)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, shape=SHAPES, both=st.booleans())
    def fork(self, index: int, shape: list[int], both: bool) -> None:
        """Fork a sequence, and draft in the fork, or in both."""
        sequence = self.sequence(index)
        other = self.call("fork", self.objects[0], sequence=sequence)
        if other is not None:
            self.draft_to(other, shape, "uneven")
            if both:
                self.draft_to(sequence, shape, "uneven")

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX)
    def drop(self, index: int) -> None:
        self.call("drop", self.objects[0], sequence=self.sequence(index))

    def attend_to(self, sequence: int, indices: list[int], group: int, kind: str) -> None:
        heads, dim = self.model.row
        query = self.source.rows((len(indices), heads * self.subject.size("group_size", group), dim), kind)
        nodes = [-1 if index < 0 else self.node(sequence, index) for index in indices]
        self.call_quietly("attend", self.objects[0], sequence=sequence, nodes=nodes, query=query, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(
        index=ANY_INDEX, indices=st.lists(st.sampled_from((0, 1, 2, 3, 5, 7, -1, 0, 1)), max_size=5), group=st.integers(1, 3),
        kind=row_kinds(everything=False),
    )  # fmt: skip
    def attend(self, index: int, indices: list[int], group: int, kind: str) -> None:
        self.attend_to(self.sequence(index), indices, group, kind)

    attend_more = attend

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, wrong=st.sampled_from(("node", "negative", "nodes", "path")))
    def look_at_unknown_nodes(self, index: int, wrong: str) -> None:
        sequence = self.sequence(index)
        count = len(self.state_of(sequence).nodes)
        if wrong == "path":
            self.call_quietly("ancestors", self.objects[0], sequence=sequence, node=count)
        else:
            nodes = {"node": [count], "negative": [-2], "nodes": [-1, -1]}[wrong]
            query = np.ones((1, *self.model.row), np.float32)
            self.call_quietly("attend", self.objects[0], sequence=sequence, nodes=nodes, query=query, scale=0.5)


register_error_states("tree", "ShapeMismatch", "DtypeMismatch", "OutOfBlocks", "SequenceNotFound", "PositionOutOfRange", "InUse")


def of_call(call: ModelCall) -> TreeSequence:
    found: TreeSequence = call.model.sequences[call.args["sequence"]]
    return found


def relatives(call: ModelCall) -> int:
    """The number of other sequences that are related to that of the call."""
    held, model = of_call(call), call.model
    assert isinstance(model, Tree)
    return sum(each.relatives == held.relatives for each in model.sequences.values()) - 1


@state("tree", "accept")
def a_path_skips_nodes(call: ModelCall) -> bool:
    path = of_call(call).paths[call.args["node"]]
    return path != [*range(len(path))]


@state("tree", "accept")
def a_path_of_several_nodes_skips_nodes_between_them(call: ModelCall) -> bool:
    path = of_call(call).paths[call.args["node"]]
    return len(path) > 1 and path[-1] - path[0] >= len(path)


@state("tree", "accept")
def a_path_is_accepted_without_free_blocks(call: ModelCall) -> bool:
    model: Tree = call.model
    return model.used()[0] == model.blocks


@state("tree", "accept")
def an_accept_frees_blocks(call: ModelCall) -> bool:
    model, held = call.model, of_call(call)
    after = len(held.tokens) + len(held.paths[call.args["node"]])
    return bool(-(-after // model.size) < model.filled(held))


@state("tree", "accept")
def a_path_is_accepted_in_a_fork_with_a_partly_filled_block(call: ModelCall) -> bool:
    return bool(relatives(call) and len(of_call(call).tokens) % call.model.size)


@state("tree", "draft")
def nodes_are_added_to_nodes_of_an_earlier_call(call: ModelCall) -> bool:
    return any(0 <= parent < len(of_call(call).nodes) for parent in call.args["parents"])


@state("tree", "draft")
def a_second_tree_is_drafted_after_an_accepted_one(call: ModelCall) -> bool:
    held = of_call(call)
    return bool(call.args["parents"] and not held.nodes and held.accepted)


@state("tree", "draft")
def a_tree_is_drafted_in_place_of_a_rejected_one(call: ModelCall) -> bool:
    model: Tree = call.model
    return bool(call.args["parents"] and model.last_change == "reject" and model.changed == call.args["sequence"])


@state("tree", "draft")
def a_relative_has_a_tree_too(call: ModelCall) -> bool:
    held = of_call(call)
    others = (each for each in call.model.sequences.values() if each is not held)
    return bool(call.args["parents"]) and any(each.nodes and each.relatives == held.relatives for each in others)


@state("tree", "draft")
def no_nodes_are_drafted_without_a_tree(call: ModelCall) -> bool:
    return not call.args["parents"] and not of_call(call).nodes


@state("tree", "draft")
def nodes_fill_the_last_block_of_the_cache(call: ModelCall) -> bool:
    model: Tree = call.model
    return bool(call.args["parents"]) and model.used(call.args["sequence"], len(call.args["parents"]))[0] == model.blocks


@state("tree", "drop")
def a_sequence_is_dropped_with_its_tree(call: ModelCall) -> bool:
    return bool(of_call(call).nodes)


@state("tree", "attend")
def a_node_is_attended_from_beside_others(call: ModelCall) -> bool:
    held = of_call(call)
    return any(node >= 0 and len(held.paths[node]) < node + 1 for node in call.args["nodes"])


@state("tree", "attend")
def a_node_without_committed_tokens_is_attended_from(call: ModelCall) -> bool:
    return not of_call(call).tokens and any(node >= 0 for node in call.args["nodes"])
