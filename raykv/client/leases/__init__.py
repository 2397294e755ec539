"""A reader's hold on blocks, and how it reads them."""
