"""A ranking of all methods on the same tasks with equal budgets. It uses the loop that runs the figures of papers."""
