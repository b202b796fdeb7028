"""What the library needs of JAX and knows nothing of its problems: programs that are kept, hashes, random bits."""
