"""What is right, said in fractions, dicts and float64: shares no code with kvref, and judges its reference like anyone else.

float64 stands in for exact arithmetic where that is a theorem: a product of two float32 is exact in it, and a sum, difference or
quotient of two float32, rounded to float64 and then to float32, is the correctly rounded one (53 >= 2 * 24 + 2).
"""
