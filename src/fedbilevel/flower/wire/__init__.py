"""What both sides of a federation agree on and send: contract, messages, layout of bytes, Flower records."""
