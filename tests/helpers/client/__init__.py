"""What clients do with a pool, for tests with Ray and without."""
