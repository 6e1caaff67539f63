"""`python -m services.kvstore` starts one KV store."""

from __future__ import annotations

import sys

from services.kvstore.main import main

sys.exit(main())
