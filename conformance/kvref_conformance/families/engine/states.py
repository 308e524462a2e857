"""States of an engine in which bugs are likely."""

from kvref_conformance.families.engine.model import Engine, Session
from kvref_conformance.searching.states import Call, refusals, state

refusals("engine", "SequenceNotFound", "TokenOutOfRange", "PositionOutOfRange", "CapacityExceeded", "OutOfBlocks")


def session(call: Call) -> Session:
    model: Engine = call.model
    return model.sessions[call.args["session"]]


def told(call: Call) -> int:
    """Number of tokens in the session of a call."""
    return len(session(call).tokens)


@state("engine", "extend")
def a_prompt_comes_in_pieces(call: Call) -> bool:
    return told(call) > 0 and not session(call).spoke


@state("engine", "extend")
def a_session_goes_on_that_has_spoken(call: Call) -> bool:
    return session(call).spoke and len(call.args["tokens"]) > 0


@state("engine", "extend")
def a_session_begins_as_one_did_that_is_gone(call: Call) -> bool:
    model: Engine = call.model
    return told(call) == 0 and any(gone[:8] == call.args["tokens"][:8] for gone in model.gone)


@state("engine", "generate")
def it_speaks_beyond_a_block_of_sixteen(call: Call) -> bool:
    return told(call) % 16 + len(call.ok) > 16


@state("engine", "generate")
def it_is_cut_short_by_the_end_of_the_context(call: Call) -> bool:
    return bool(len(call.ok) < call.args["count"])


@state("engine", "step")
def sessions_of_different_lengths_speak_together(call: Call) -> bool:
    model: Engine = call.model
    return len({len(model.sessions[session].tokens) for session in call.args["sessions"]}) > 1


@state("engine", "generate", "step")
def one_speaks_that_is_a_fork_or_was_forked(call: Call) -> bool:
    model: Engine = call.model
    speaking = call.args["sessions"] if "sessions" in call.args else [call.args["session"]]
    return any(model.sessions[session].clause in ("ENG-08", "ENG-10") for session in speaking)


@state("engine", "fork")
def a_fork_is_made_in_the_middle_of_a_block(call: Call) -> bool:
    return told(call) % 16 != 0


@state("engine", "sample")
def several_answer_out_of_a_block_that_is_partly_filled(call: Call) -> bool:
    return told(call) % 16 != 0 and call.args["n"] > 1 and len(call.ok) > 0


@state("engine", "cancel")
def one_is_cut_off_while_others_speak(call: Call) -> bool:
    model: Engine = call.model
    return call.args["count"] > 0 and any(each.spoke for each in model.sessions.values())


@state("engine", "load")
def one_is_loaded_that_was_closed_since(call: Call) -> bool:
    model: Engine = call.model
    return model.saved[call.args["saved"]].tokens in model.gone


@state("engine", "truncate")
def some_tokens_go_and_some_stay(call: Call) -> bool:
    return bool(0 < call.args["length"] < told(call))


@state("engine", "remove")
def tokens_go_from_the_middle(call: Call) -> bool:
    return bool(0 < call.args["start"] < call.args["stop"] < told(call))


@state("engine", "close")
def one_goes_while_others_speak(call: Call) -> bool:
    model: Engine = call.model
    return sum(each.spoke for each in model.sessions.values()) > 1
