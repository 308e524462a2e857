"""State machine of the family `engine`: random call sequences."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref.canary import BOS, FIRST_WORD
from kvref.canary.hybrid import LAP, HybridCanary, laps
from kvref_conformance.families.engine.model import Engine, SessionModel
from kvref_conformance.fuzz.base_machine import LAST_INDEX, FamilyStateMachine, choose_one
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state

INDEX = st.sampled_from((*(0, 1, 2) * 6, LAST_INDEX))
COUNT = st.sampled_from((1, 2, 3, 5, 9, 17, 0))
PROMPTS = 3  # only a few distinct prompts, so that sessions often share a prefix


class EngineStateMachine(FamilyStateMachine):
    family = "engine"

    @initialize(heads=st.sampled_from((2, 1)), recalls=st.sampled_from((0, 0, 1)), room=st.sampled_from((1, 3, 2)))
    def new(self, heads: int, recalls: int, room: int) -> None:
        context = self.subject.size("context", 48)
        self.make_object(
            num_layers=2, num_kv_heads=heads, num_query_heads=2, head_dim=32, context=context, period=12, window=0,
            recalls=recalls, recurrent=0, cache_tokens=room * (context + 63) // 64 * 64,
        )  # fmt: skip
        self.begin(0, 0)
        self.begin(1, 0)

    @property
    def model(self) -> Engine:
        model = self.models[self.objects[0]]
        assert isinstance(model, Engine)
        return model

    def session(self, index: int) -> int:
        """An existing session, or an unknown one for LAST_INDEX or if no session exists."""
        session = choose_one(self.model.sessions, index)
        return 1000 if session is None or index == LAST_INDEX else session

    def length(self, session: int) -> int:
        return len(self.model.sessions[session].tokens) if session in self.model.sessions else 0

    def prompt(self, number: int) -> list[int]:
        """Period plus 2 distinct words (at least 14), then the second of them again, so that the next token is certain.

        A canary that continues laps gets laps.
        """
        canary = self.model.canary
        period, words = canary.period, canary.words
        if isinstance(canary, HybridCanary) and canary.continues_laps:
            return [BOS, *laps([(number * 5 + place * 7) % LAP for place in range(LAP)], number, period + 3)]
        count = max(period, 12) + 2
        prompt = [FIRST_WORD + (number * 5 + place * 7) % words for place in range(count)]
        return [BOS, *prompt, prompt[1]]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.session(which % 3)
        return {
            "open": self.open_in_a_row,
            "extend": lambda number: self.on_edited("extend", tokens=self.prompt(number % PROMPTS)),
            "generate": lambda number: self.on_edited("generate", count=1 + number % 3),
            "step": self.step_in_a_row,
            "sample": lambda number: self.on_edited("sample", n=1 + number % 3, count=1 + number % 4),
            "cancel": lambda number: self.on_edited("cancel", count=1 + number),
            "fork": lambda number: self.continue_with(self.on_edited("fork"), number),
            "load": lambda number: self.continue_with(self.call("load", self.objects[0], saved=self.saved), 1),
            "truncate": lambda number: self.on_edited("truncate", length=max(0, self.length(self.edited) - 1 - number)),
            "remove": lambda number: self.on_edited("remove", start=number, stop=min(self.length(self.edited), number + 2)),
            "close": self.close_in_a_row,
        }

    edit_in_a_row_again = FamilyStateMachine.edit_in_a_row

    def save_before_edits(self) -> Any:
        return self.on_edited("save")

    def on_edited(self, name: str, **args: Any) -> Any:
        return self.call(name, self.objects[0], session=self.edited, **args)

    def continue_with(self, session: int | None, number: int) -> None:
        """Make the next edits in this session, if it exists and the number is odd."""
        self.edited = session if session is not None and number % 2 else self.edited

    def open_in_a_row(self, number: int) -> None:
        """Open a session, at most a sixth one, and continue with it."""
        if len(self.model.sessions) < 6:
            self.continue_with(self.call("open", self.objects[0]), 1)

    def step_in_a_row(self, number: int) -> None:
        other = choose_one({each for each, state in self.model.sessions.items() if state.tokens}, number)
        self.call("step", self.objects[0], sessions=[*{self.edited: None, (self.edited if other is None else other): None}])

    def close_in_a_row(self, number: int) -> None:
        self.on_edited("close")
        self.continue_with(choose_one(self.model.sessions, number), 1)

    @precondition(lambda self: self.objects)
    @rule(number=st.integers(0, PROMPTS - 1), cut=st.sampled_from((0, 1, 5, 13)))
    def begin(self, number: int, cut: int) -> None:
        """Open a session and append a prompt to it in one or two chunks."""
        if self.objects and len(self.model.sessions) < 4:
            session = self.call("open", self.objects[0])
            tokens = self.prompt(number)
            for chunk in (tokens[:cut], tokens[cut:]) if cut else (tokens,):
                self.call("extend", self.objects[0], session=session, tokens=chunk)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, number=st.integers(0, PROMPTS - 1), count=COUNT)
    def extend(self, which: int, number: int, count: int) -> None:
        self.call("extend", self.objects[0], session=self.session(which), tokens=self.prompt(number)[1 : count + 1])

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.sampled_from((-1, 10**6)))
    def extend_wrongly(self, which: int, wrong: int) -> None:
        self.call("extend", self.objects[0], session=self.session(which), tokens=[FIRST_WORD, wrong])

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=st.sampled_from((2, 1, 5, 9, 20, 0, -1)))
    def generate(self, which: int, count: int) -> None:
        self.call("generate", self.objects[0], session=self.session(which), count=count)

    generate_more = generate

    @precondition(lambda self: self.objects)
    @rule(which=st.sampled_from(((0, 1), (1, 0), (0, 1, 2), (1,), (0, LAST_INDEX), ())), times=st.integers(1, 2))
    def step(self, which: tuple[int, ...], times: int) -> None:
        for _ in range(times):
            sessions = list(dict.fromkeys(self.session(each) for each in which))
            self.call("step", self.objects[0], sessions=sessions)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT)
    def fork(self, which: int, count: int) -> None:
        """Fork a session and append other tokens to the fork, then generate in both."""
        child = self.call("fork", self.objects[0], session=self.session(which))
        if child is not None:
            self.call("extend", self.objects[0], session=child, tokens=self.prompt(2)[1 : count + 1])
            self.generate(which, 2)
            self.call("generate", self.objects[0], session=child, count=2)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, n=st.sampled_from((2, 1, 3, 0, -1)), count=st.sampled_from((3, 1, 7, 0, -1)))
    def sample(self, which: int, n: int, count: int) -> None:
        """Sample, then generate in the session itself, which sampling must not change."""
        self.call("sample", self.objects[0], session=self.session(which), n=n, count=count)
        self.generate(which, 2)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=st.sampled_from((3, 1, 7, 0, -1)))
    def cancel(self, which: int, count: int) -> None:
        self.call("cancel", self.objects[0], session=self.session(which), count=count)
        self.generate(which, 2)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, number=st.integers(0, PROMPTS - 1))
    def save(self, which: int, number: int) -> None:
        """Save a session and close it. A new session then reuses its memory."""
        session = self.session(which)
        self.call("save", self.objects[0], session=session)
        self.close(which, number)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, number=st.integers(0, PROMPTS - 1), used=st.sampled_from((True, True, False)))
    def load(self, which: int, number: int, used: bool) -> None:
        """Load a session, and generate in it or close it without use."""
        saved = choose_one(self.model.saved, which)
        unknown = saved is None or which == LAST_INDEX
        session = self.call("load", self.objects[0], saved=1000 if unknown else saved)
        if session is not None and used:
            self.call("generate", self.objects[0], session=session, count=3)
        elif session is not None:
            self.close_and_begin(session, number)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, back=st.sampled_from((1, 2, 4, 8, 16, 0, -1, 99)))
    def truncate(self, which: int, back: int) -> None:
        session = self.session(which)
        self.call("truncate", self.objects[0], session=session, length=max(-1, self.length(session) - back))
        self.generate(which, 2)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, start=st.integers(-1, 20), count=st.sampled_from((1, 3, 8, 0, 99)))
    def remove(self, which: int, start: int, count: int) -> None:
        session = self.session(which)
        self.call("remove", self.objects[0], session=session, start=start, stop=start + count)
        self.generate(which, 2)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, number=st.integers(0, PROMPTS - 1))
    def close(self, which: int, number: int) -> None:
        self.close_and_begin(self.session(which), number)

    def close_and_begin(self, session: int, number: int) -> None:
        """Close a session and open another, which reuses its memory."""
        self.call("close", self.objects[0], session=session)
        self.begin(number, 0)
        self.step((0, 1), 2)


# States of an engine in which bugs are likely.

register_error_states("engine", "SequenceNotFound", "TokenOutOfRange", "PositionOutOfRange", "CapacityExceeded", "OutOfBlocks")


def session(call: ModelCall) -> SessionModel:
    model: Engine = call.model
    return model.sessions[call.args["session"]]


def length(call: ModelCall) -> int:
    """The number of tokens in the session of a call."""
    return len(session(call).tokens)


@state("engine", "extend")
def prompt_in_chunks(call: ModelCall) -> bool:
    return length(call) > 0 and not session(call).has_generated


@state("engine", "extend")
def extend_after_generate(call: ModelCall) -> bool:
    return session(call).has_generated and len(call.args["tokens"]) > 0


@state("engine", "extend")
def prompt_of_a_closed_session(call: ModelCall) -> bool:
    model: Engine = call.model
    return length(call) == 0 and any(tokens[:8] == call.args["tokens"][:8] for tokens in model.closed_tokens)


@state("engine", "generate")
def generate_past_a_block_of_16(call: ModelCall) -> bool:
    return length(call) % 16 + len(call.result) > 16


@state("engine", "generate")
def generate_to_the_end_of_the_context(call: ModelCall) -> bool:
    return bool(len(call.result) < call.args["count"])


@state("engine", "step")
def step_of_sessions_of_different_lengths(call: ModelCall) -> bool:
    model: Engine = call.model
    return len({len(model.sessions[session].tokens) for session in call.args["sessions"]}) > 1


@state("engine", "generate", "step")
def generate_in_a_fork_or_its_parent(call: ModelCall) -> bool:
    model: Engine = call.model
    sessions = call.args["sessions"] if "sessions" in call.args else [call.args["session"]]
    return any(model.sessions[session].clause in ("ENG-08", "ENG-10") for session in sessions)


@state("engine", "fork")
def fork_inside_a_block(call: ModelCall) -> bool:
    return length(call) % 16 != 0


@state("engine", "sample")
def sample_from_a_partly_filled_block(call: ModelCall) -> bool:
    return length(call) % 16 != 0 and call.args["n"] > 1 and len(call.result) > 0


@state("engine", "cancel")
def cancel_beside_other_sessions(call: ModelCall) -> bool:
    model: Engine = call.model
    return call.args["count"] > 0 and any(each.has_generated for each in model.sessions.values())


@state("engine", "load")
def load_of_a_closed_session(call: ModelCall) -> bool:
    model: Engine = call.model
    return model.saved[call.args["saved"]].tokens in model.closed_tokens


@state("engine", "truncate")
def truncate_to_a_shorter_length(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < length(call))


@state("engine", "remove")
def remove_in_the_middle(call: ModelCall) -> bool:
    return bool(0 < call.args["start"] < call.args["stop"] < length(call))


@state("engine", "close")
def close_beside_other_sessions(call: ModelCall) -> bool:
    model: Engine = call.model
    return sum(each.has_generated for each in model.sessions.values()) > 1
