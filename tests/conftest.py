"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# An example may take as long as it takes: a busy machine is no fault of the code.
settings.register_profile("dblp", deadline=None)
settings.load_profile("dblp")
