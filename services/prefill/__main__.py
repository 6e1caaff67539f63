"""`python -m services.prefill` starts one prefill worker."""

from __future__ import annotations

import sys

from services.prefill.main import main

sys.exit(main())
