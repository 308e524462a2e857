"""Server-sent events, as far as completions take them: lines of `data:`, and comments and other fields that are left out."""

from collections.abc import AsyncGenerator, AsyncIterator


async def data_lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """What stands behind `data:`, line by line, however the lines are cut into parts. A line without an end is one too."""
    begun = bytearray()  # a line that has no end yet
    async for part in parts:
        first, *others = part.split(b"\n")
        begun += first
        for line in others:
            if data := _data(bytes(begun)):
                yield data
            begun = bytearray(line)
    if data := _data(bytes(begun)):
        yield data


def _data(line: bytes) -> bytes:
    return line[5:].strip() if line.startswith(b"data:") else b""
