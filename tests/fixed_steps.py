"""Fixed numbers in place of the steps of a method that adapt, for tests of other claims than those about steps."""

import fedbilevel as fb
from fedbilevel.core.hyperparameters import entries, replaced

NUMBERS = {"outer_lr": 0.1, "lr": 0.5, "step": 0.1, "client_lr": 0.01}
OF_SYSTEMS = {"lr": 0.1}
XYV = fb.XYV(x=0.01, y=0.1, v=0.1)


def fixed(method):
    """The method, or part, with a number for each step that is None, of its parts too."""
    for entry in entries(method):
        may_be_none = entry.field.metadata.get("adaptive") or entry.field.metadata.get("tied")
        if may_be_none and entry.value is None:
            numbers = OF_SYSTEMS if isinstance(entry.holders[-1], fb.parts.SystemSteps) else NUMBERS
            number = getattr(XYV, entry.of) if entry.of else numbers[entry.field.name]
            method = replaced(method, entry.keys, number)
    return method
