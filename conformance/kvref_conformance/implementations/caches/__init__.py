"""Adapters of third-party caches, casts, quantizers, block pools and attention, one module per library and kind of component.

An adapter translates names, shapes and exceptions. It does not validate arguments for the library and does not repair results.
"""
