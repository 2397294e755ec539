"""What tests share: of any running pool in `pools`, else in the folder of what it helps to test."""
