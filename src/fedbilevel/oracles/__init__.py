"""Compute the parts of hypergradients: products with second derivatives, and solutions of linear systems in ∇²yy g."""
