"""A trace: a conversation with an implementation, written down so that it can be read, judged, shrunk and held again."""
