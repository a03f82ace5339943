"""Kernels are interpreted in processes of their own: Triton decides at import whether it compiles or interprets.

`pytest` runs the other files through test_interpreted.py; `TRITON_INTERPRET=1 pytest tests/interp` runs them
directly.
"""

import os
from pathlib import Path

COMPILING = {"test_interpreted.py", "test_lint.py"}

if os.environ.get("TRITON_INTERPRET") == "1":
    import hopper_on_host

    hopper_on_host.interpret()
    collect_ignore = list(COMPILING)
else:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in COMPILING]
