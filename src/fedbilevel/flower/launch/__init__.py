"""Processes of a federation: Flower's commands, workers, credentials; and a federation within one process."""
