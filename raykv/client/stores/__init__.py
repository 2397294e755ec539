"""The stores that a process asks, and its threads that wait for them."""
