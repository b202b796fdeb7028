"""Programs of other hands: the same mathematics, without this library."""
