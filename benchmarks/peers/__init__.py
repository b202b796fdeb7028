"""Programs for comparison: the same mathematics without this library."""
