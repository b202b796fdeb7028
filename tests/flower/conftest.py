"""The algorithm with client state that the tests of engines have serves here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
