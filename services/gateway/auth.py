"""From an API key to the tenant that it stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from services.gateway.errors import unauthorized

OPEN_TENANT = "default"


class Keyring:
    """Knows keys only by digest, so that a lookup takes the same time for any wrong key."""

    def __init__(self, tenants_by_key: Mapping[str, str]) -> None:
        self._tenants = {_digest(key): tenant for key, tenant in tenants_by_key.items()}

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization: Bearer KEY` header; without keys all are one tenant. Raises ApiError 401."""
        if not self._tenants:
            return OPEN_TENANT
        scheme, _, key = (authorization or "").strip().partition(" ")
        if not key or scheme.lower() != "bearer":
            raise unauthorized("An API key is needed: send it as 'Authorization: Bearer KEY'.")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise unauthorized("This API key is not known.")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
