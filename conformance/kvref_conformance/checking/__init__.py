"""What checks are written with: how they register, what they say of a result, and small objects to look at."""
