"""Replace steps that adapt by fixed numbers, for tests of claims that are not about steps."""

import fedbilevel as fb
from fedbilevel.core.hyperparameters import entries, replaced

NUMBERS = {"outer_lr": 0.1, "lr": 0.5, "step": 0.1, "client_lr": 0.01}
OF_SYSTEMS = {"lr": 0.1}
XYV = fb.XYV(x=0.01, y=0.1, v=0.1)


def fixed(method):
    """Return the method or part with a number for each step that is None, also within its parts."""
    for entry in entries(method):
        may_be_none = entry.field.metadata.get("adaptive") or entry.field.metadata.get("tied")
        if may_be_none and entry.value is None:
            numbers = OF_SYSTEMS if isinstance(entry.holders[-1], fb.parts.SystemSteps) else NUMBERS
            number = getattr(XYV, entry.of) if entry.of else numbers[entry.field.name]
            method = replaced(method, entry.keys, number)
    return method
