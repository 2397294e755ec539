"""`raykv doctor` finds faults that keep a node out of a pool or make the pool slow there, and gives advice."""
