"""The error for a server's reply that is no completion."""

NO_ROOM_STATUSES = (429, 503)  # statuses of a server that has no room at the moment

NOT_CONNECTED = "no connection in time"  # the kind of an error after which it is unknown how the server would have replied


class ServerError(Exception):
    """A reply that is no completion, or no reply. The message is one line."""

    def __init__(self, said: str, kind: str, status: int = 0) -> None:
        """kind: one of a few categories, for counting. status: the HTTP status if it is the error, else 0."""
        super().__init__(said)
        self.kind, self.status = kind, status

    @property
    def no_room(self) -> bool:
        return self.status in NO_ROOM_STATUSES
