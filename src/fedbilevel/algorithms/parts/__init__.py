"""Parts that several methods share: wrappers, local steps, inner rounds, hypergradients, regularization."""
