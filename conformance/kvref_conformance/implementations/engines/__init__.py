"""Adapters of third-party inference engines, one module per engine. A canary model in the engine makes wrong KV reads visible."""
