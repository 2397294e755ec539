"""What a directory knows."""
