"""A Node process that serves JSON lines, for adapters of npm packages."""

import atexit
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

NODE = shutil.which("node")


def package_version(package: str) -> str:
    """Return the version of a package that Node finds. Raises ImportError."""
    if NODE is None:
        raise ImportError(f"{package} needs node")
    file = f"require('node:path').join(require.resolve('{package}'), '../../package.json')"
    found = subprocess.run([NODE, "-p", f"require({file}).version"], capture_output=True, text=True, check=False, cwd="/")
    if found.returncode:
        raise ImportError(f"expected the npm package {package} in NODE_PATH")
    return found.stdout.strip()


class NodeProcess:
    def __init__(self, program: Path, descriptor: int = 1) -> None:
        """descriptor: the file descriptor of the replies. If it is not 1, what the program prints to stdout is discarded."""
        command = [str(NODE), str(program)]
        if descriptor != 1:
            command = ["sh", "-c", f'exec "$0" "$1" {descriptor}>&1 1>/dev/null', *command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.stop)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request to Node. Raises RuntimeError if it fails there.

        If the call is interrupted, Node is stopped, because the pending reply would be taken for that of the next request.
        """
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except BaseException:
            self.stop()
            raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


_RUNNING: dict[Path, NodeProcess] = {}


def running_node(program: Path, descriptor: int = 1) -> NodeProcess:
    """Return the running Node process of a program, or start one, which writes its replies to a file descriptor."""
    if program not in _RUNNING or not _RUNNING[program].runs:
        _RUNNING[program] = NodeProcess(program, descriptor)
    return _RUNNING[program]
