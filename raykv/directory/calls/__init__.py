"""What is asked of a directory, and how it is answered."""
