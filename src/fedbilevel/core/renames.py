"""Names of earlier versions and what stands in their place; used for error messages alone."""

PUBLIC = {
    "algorithm": "a method is a subclass of fedbilevel.Algorithm, without a decorator",
}
"""Names that `fedbilevel` once handed out."""

FIELDS = {
    "first": "wait_for, of the wrapper Asynchronous (in a spec asynchronous.wait_for) and of ADBO",
    "max_staleness": "a field of the wrapper Asynchronous (in a spec asynchronous.max_staleness) and of ADBO",
    "delay_penalty": "a field of the wrapper Asynchronous (in a spec asynchronous.delay_penalty)",
    **dict.fromkeys(
        ("policy", "pruned", "fixed", "min_coverage"),
        "a field of the wrapper Submodels (in a spec a field of [submodels])",
    ),
    "own_x": "local of the problem, Bilevel(outer, inner, local='x'), and of the task hyper_cleaning (task.local=x)",
}
"""Fields of methods that have another name or place now."""
