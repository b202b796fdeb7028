"""Names of earlier versions and what stands in their place; used for error messages alone."""

PUBLIC = {
    "algorithm": "a method is a subclass of fedbilevel.Algorithm, without a decorator",
}
"""Names that `fedbilevel` once handed out."""
