"""Where every block is: a state machine without Ray, clock or I/O."""
