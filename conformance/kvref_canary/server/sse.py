"""The part of server-sent events that completions use: `data:` lines. Comments and other fields are skipped."""

from collections.abc import AsyncGenerator, AsyncIterator


async def data_lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the text after `data:` of each line, however lines are split into parts. An unfinished last line counts too."""
    begun = bytearray()  # a line that has no end yet
    async for part in parts:
        first, *others = part.split(b"\n")
        begun += first
        for line in others:
            if data := _data_of_line(bytes(begun)):
                yield data
            begun = bytearray(line)
    if data := _data_of_line(bytes(begun)):
        yield data


def _data_of_line(line: bytes) -> bytes:
    return line[5:].strip() if line.startswith(b"data:") else b""
