"""The options of a run, from the command line of `kvref check` or from the pytest plugin."""

import shlex
from dataclasses import dataclass

from kvref_conformance.drivers.resource_limits import TIMEOUT

EXAMPLES = 40


@dataclass(frozen=True)
class Effort:
    """How thoroughly to judge.

    examples: number of call sequences that a state machine tries; deep: 20 times as many, and longer ones. slow: also run checks
    that need gigabytes. real: also run checks at production sizes that take seconds. timeout: seconds per call. keep_traces: also
    store traces of passed checks. shrinks: whether a state machine continues after a failure, to find further failures and
    shorter call sequences; this takes most of its time.
    """

    seed: int = 0
    slow: bool = False
    real: bool = False
    examples: int = EXAMPLES
    deep: bool = False
    timeout: float = TIMEOUT
    keep_traces: bool = False
    shrinks: bool = True

    def includes(self, option: str) -> bool:
        """Whether checks that need this option run. option: Check.option."""
        return {"": True, "--slow": self.slow, "--real": self.real}[option]

    @property
    def num_sequences(self) -> int:
        return 20 * self.examples if self.deep else self.examples

    @property
    def max_steps(self) -> int:
        """The maximum number of calls per call sequence."""
        return 60 if self.deep else 20


@dataclass(frozen=True)
class RunOptions:
    """The selected implementation, and how to judge it.

    family: judge only this family, or several, separated by commas. isolate: whether it runs in its own process; None means that
    only foreign code does. show_stderr: whether to show the standard error of a program.
    """

    name: str
    effort: Effort
    family: str | None = None
    isolate: bool | None = None
    show_stderr: bool = False

    def repeat_command(self, clause: str) -> str:
        """The command that judges one clause again with the same options."""
        effort, command = self.effort, ["kvref", "check", self.name, "--clause", clause]
        command += ["--family", self.family] if self.family else []
        command += ["--seed", str(effort.seed)] if effort.seed else []
        command += ["--examples", str(effort.examples)] if effort.examples != EXAMPLES else []
        command += ["--timeout", f"{effort.timeout:g}"] if effort.timeout != TIMEOUT else []
        switches = {"--deep": effort.deep, "--slow": effort.slow, "--real": effort.real, "--stderr": self.show_stderr}
        switches |= {"--isolate": self.isolate is True, "--no-isolate": self.isolate is False}
        return shlex.join([*command, *(switch for switch, on in switches.items() if on)])
