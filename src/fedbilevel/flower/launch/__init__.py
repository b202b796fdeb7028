"""Start the processes of a federation: Flower's commands, workers and credentials; or run it within one process."""
