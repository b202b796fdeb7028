"""Provide what several methods share: layers, wrappers, local steps, inner rounds, hypergradients, regularization."""
