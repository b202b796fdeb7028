"""All methods on the same tasks under equal budgets: a program of its own, on the loop that plays the figures."""
