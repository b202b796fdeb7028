"""What hypergradients are made of: products with second derivatives, and inverses of the inner Hessian."""
