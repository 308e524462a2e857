"""Call traces: recorded calls and replies that can be read, judged, shrunk and replayed."""
