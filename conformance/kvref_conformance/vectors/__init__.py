"""Static test vectors: conversations with the reply each request must get, and arrays of the formats, made from the reference."""
