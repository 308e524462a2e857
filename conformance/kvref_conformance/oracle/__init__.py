"""The oracle: computes expected results with fractions, dicts and float64. It shares no code with kvref, and judges it too.

float64 replaces exact arithmetic only where that is proved: the product of two float32 numbers is exact in float64. A sum,
difference or quotient of two float32 numbers that is rounded to float64 and then to float32 is correctly rounded, because
float64 has at least 2 * 24 + 2 bits of precision (it has 53).
"""
