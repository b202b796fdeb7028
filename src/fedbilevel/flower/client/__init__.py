"""A client of a federation: what it has, its replies, what it keeps."""
