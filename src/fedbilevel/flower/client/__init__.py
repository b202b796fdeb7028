"""A client of a federation: what it has, what it answers, what it keeps."""
