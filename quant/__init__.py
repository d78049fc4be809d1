"""What the bits of a checkpoint mean, and how to choose them."""
