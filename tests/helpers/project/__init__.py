"""For tests of this repository: its pages, examples, versions, and the times of its tests."""
