"""What was asked of the judge: of `kvref check` on its command line, or of pytest by the options of the plugin."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvref_conformance.drivers.guard import TIMEOUT

if TYPE_CHECKING:
    from kvref_conformance.judge import Judge

EXAMPLES = 100


@dataclass(frozen=True)
class Effort:
    """How hard to look. examples: sequences of calls a machine tries; deep: many more and longer ones."""

    seed: int = 0
    slow: bool = False
    examples: int = EXAMPLES
    deep: bool = False
    timeout: float = TIMEOUT  # seconds a call may take
    keep: bool = False  # traces of what passes too

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

    @property
    def isolated(self) -> bool:
        """Whether it runs in a child process of the judge's. A program has one already. Raises CannotRun."""
        from kvref_conformance import isolated  # late, for pytest reads this file wherever kvref is installed
        from kvref_conformance.implementations import is_foreign, is_program

        if is_program(self.name):
            return False
        return isolated.POSSIBLE and is_foreign(self.name) if self.isolate is None else self.isolate

    def judge(self) -> Judge:
        """Raises CannotRun where there is nothing of that name to judge."""
        from kvref_conformance.implementations import load
        from kvref_conformance.isolated import IsolatedJudge
        from kvref_conformance.judge import Judge

        if self.isolated:
            return IsolatedJudge(self.name, self.effort)
        return Judge(load(self.name, self.show_stderr), self.effort, self.name)

    def again(self, clause: str) -> str:
        """The command that asks for one clause of it again."""
        effort, command = self.effort, ["kvref", "check", self.name, "--clause", clause]
        command += ["--family", self.family] if self.family else []
        command += ["--seed", str(effort.seed)] if effort.seed else []
        command += ["--examples", str(effort.examples)] if effort.examples != EXAMPLES else []
        command += ["--timeout", f"{effort.timeout:g}"] if effort.timeout != TIMEOUT else []
        switches = {"--deep": effort.deep, "--slow": effort.slow, "--stderr": self.show_stderr}
        switches |= {"--isolate": self.isolate is True, "--no-isolate": self.isolate is False}
        return shlex.join([*command, *(switch for switch, on in switches.items() if on)])
