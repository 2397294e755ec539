"""The actor that knows where every block is."""
