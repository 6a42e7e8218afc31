"""What quantizing the KV cache costs a real model, and what it saves: see __main__.py.

Importing this makes the packages that packages.py installs importable.
"""

import os
import sys

from .packages import DEPS

# Set before numpy is first imported, which is when OpenBLAS reads it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
if str(DEPS) not in sys.path:
    sys.path.insert(0, str(DEPS))
