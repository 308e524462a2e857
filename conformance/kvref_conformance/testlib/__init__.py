"""The library that checks are written with: registration, assertions, small objects, and data."""
