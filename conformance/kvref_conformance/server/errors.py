"""What a server may answer that is no completion."""

NO_ROOM = (429, 503)  # statuses by which a server says that it has no room at the moment


class ServerError(Exception):
    """Says in one line what came, or that nothing came."""

    def __init__(self, said: str, kind: str, status: int = 0) -> None:
        """kind: one of few, to count by. status: of HTTP, where that is what was wrong."""
        super().__init__(said)
        self.kind, self.status = kind, status

    @property
    def no_room(self) -> bool:
        return self.status in NO_ROOM
