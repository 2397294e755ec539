"""Code that tests share. `pools` is for tests of running pools; each folder is for tests of one part."""
