"""What tests share: pools, processes to kill, stand-ins, the oracle of the directory."""
