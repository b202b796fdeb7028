"""Provide the parts that several methods share: layers, wrappers, local steps, inner rounds, hypergradients."""
