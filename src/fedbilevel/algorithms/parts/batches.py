"""The field that several sets of fields have in common."""

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import static
from fedbilevel.core.errors import require_count


class Batches(Algorithm):
    """How many samples a client draws at a time.

    Args:
        batch_size: samples per draw for each loss, with replacement; None takes all samples.
    """

    batch_size: int | None = static(default=32)

    def validate(self) -> None:
        require_count(f"{self.label}.batch_size", self.batch_size, optional=True)
