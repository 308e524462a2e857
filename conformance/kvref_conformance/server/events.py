"""Server-sent events, as far as completions take them: lines of `data:`, and comments and other fields that are left out."""

from collections.abc import AsyncGenerator, AsyncIterator


async def data_lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """What stands behind `data:`, line by line, however the lines are cut into parts. A line without an end is one too."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if data := _data(line):
                yield data
    if data := _data(rest):
        yield data


def _data(line: bytes) -> bytes:
    return line[5:].strip() if line.startswith(b"data:") else b""
