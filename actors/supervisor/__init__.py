"""The actor that keeps a store on each node."""
