"""The field that several sets of fields have in common."""

from fedbilevel.core.config import config, static
from fedbilevel.core.errors import require_count


@config
class Batches:
    """How many samples a client draws at a time.

    Args:
        batch_size: samples per draw for each loss, with replacement; None takes all samples.
    """

    batch_size: int | None = static(default=32)

    def validate(self) -> None:
        require_count(f"{type(self).__name__}.batch_size", self.batch_size, optional=True)
