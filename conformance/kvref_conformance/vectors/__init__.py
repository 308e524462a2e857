"""Static test vectors, made from the reference: call traces with the correct replies, and arrays in the formats."""
