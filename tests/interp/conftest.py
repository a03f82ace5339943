"""Kernels are interpreted in processes of their own: Triton decides at import whether it compiles or interprets.

`pytest` runs the files below through test_interpreted.py; `TRITON_INTERPRET=1 pytest tests/interp` runs them
directly.
"""

import os

INTERPRETED = ("test_plan.py", "test_kernels.py", "test_fused.py")

if os.environ.get("TRITON_INTERPRET") == "1":
    import hopper_on_host

    hopper_on_host.interpret()
    collect_ignore = ["test_interpreted.py", "test_lint.py"]
else:
    collect_ignore = list(INTERPRETED)
