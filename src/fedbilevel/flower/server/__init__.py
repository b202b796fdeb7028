"""The server of a federation: the engine that reaches clients through Flower."""
