"""Caches, casts, quantizers, pools and attention of other people, a file a library: they translate, and repair nothing."""
