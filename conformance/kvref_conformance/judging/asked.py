"""What was asked of the judge: of `kvref check` on its command line, or of pytest by the options of the plugin."""

import shlex
from dataclasses import dataclass

from kvref_conformance.conversation.drivers.guard import TIMEOUT

EXAMPLES = 40


@dataclass(frozen=True)
class Effort:
    """How hard to look. examples: sequences of calls a machine tries; deep: many more and longer ones.

    slow: the checks that take gigabytes too; real: those of sizes as models have them that take seconds.
    simpler: whether a machine that found something goes on, for others and for fewer calls, which takes most of its time.
    """

    seed: int = 0
    slow: bool = False
    real: bool = False
    examples: int = EXAMPLES
    deep: bool = False
    timeout: float = TIMEOUT  # seconds a call may take
    keep: bool = False  # traces of what passes too
    simpler: bool = True

    def runs(self, option: str) -> bool:
        """Whether checks run that take an option: Check.option."""
        return {"": True, "--slow": self.slow, "--real": self.real}[option]

    @property
    def sequences(self) -> int:
        return 20 * self.examples if self.deep else self.examples

    @property
    def steps(self) -> int:
        """Calls in a sequence, at most."""
        return 60 if self.deep else 20


@dataclass(frozen=True)
class Asked:
    """An implementation, how hard to look at it, and where it is to run.

    isolate: in a process of its own, or in this one; None leaves it to whose code it is.
    """

    name: str
    effort: Effort
    family: str | None = None
    isolate: bool | None = None
    show_stderr: bool = False  # a program's

    def again(self, clause: str) -> str:
        """The command that asks for one clause of it again."""
        effort, command = self.effort, ["kvref", "check", self.name, "--clause", clause]
        command += ["--family", self.family] if self.family else []
        command += ["--seed", str(effort.seed)] if effort.seed else []
        command += ["--examples", str(effort.examples)] if effort.examples != EXAMPLES else []
        command += ["--timeout", f"{effort.timeout:g}"] if effort.timeout != TIMEOUT else []
        switches = {"--deep": effort.deep, "--slow": effort.slow, "--real": effort.real, "--stderr": self.show_stderr}
        switches |= {"--isolate": self.isolate is True, "--no-isolate": self.isolate is False}
        return shlex.join([*command, *(switch for switch, on in switches.items() if on)])
