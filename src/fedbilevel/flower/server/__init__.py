"""Run the server of a federation: an engine that reaches clients through Flower."""
