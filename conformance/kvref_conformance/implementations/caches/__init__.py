"""Caches, casts, quantizers, pools and attention that other people wrote, a file a library: they translate, and repair nothing."""
