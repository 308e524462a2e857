"""What each clause demands, a module or two a chapter: small functions whose names are sentences.

The laws are in three modules (streams of tokens, errors, memory), the formats in three (elements, rows, affine rows), and the
tiered cache in two.
"""
