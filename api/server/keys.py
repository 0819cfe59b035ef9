"""API keys: a file of their hashes, and who a request's key belongs to. The keys themselves are kept nowhere."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BEARER_SUBPROTOCOL = "base64url.bearer.authorization.kvblend."
KEY_CHARS_MAX = 512
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
OPERATOR = "operator"
_ENTRY = re.compile(rf"blake2b:([0-9a-f]{{64}}):([0-9a-f]{{32}})(:{OPERATOR})?")
_PERSON = b"kvblend-api-key"


class BadKeys(ValueError):
    """A file of keys that cannot be read; the message names the entry and never shows its value."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose key it is: `digest` is the key's hash, `id` (32 random hex digits) parts the tenant's chunks from others'.

    The id stays when the key is replaced. Nobody but the file's reader can know it, so nobody else can work out a
    chunk's id from its text. An `operator` may read the figures of all tenants together.
    """

    name: str
    digest: bytes = field(repr=False)
    id: str = field(repr=False)
    operator: bool = False

    @property
    def entry(self) -> str:
        """Its line of the file."""
        role = f":{OPERATOR}" if self.operator else ""
        return f'{self.name} = "blake2b:{self.digest.hex()}:{self.id}{role}"'


def new_key() -> str:
    """A key of 256 random bits."""
    return f"kvb_{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    """The hash that is kept of a key, 32 bytes. Plain BLAKE2b does: 256 random bits cannot be guessed, however fast."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32, person=_PERSON).digest()


def issue(name: str, tenant_id: str | None = None, *, operator: bool = False) -> tuple[Tenant, str]:
    """A new key for a tenant, of this id or a new one. ValueError for a name that is none."""
    if not NAME.fullmatch(name):
        raise ValueError(f"name is {name[:80]!r}; it must have 1..64 letters, digits, - and _")
    key = new_key()
    return Tenant(name, digest_of(key), tenant_id or secrets.token_hex(16), operator), key


def parse_keys(text: str) -> list[Tenant]:
    """The tenants of a file's text, in its order. Raises BadKeys."""
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadKeys(f"is no TOML: {error}") from None
    tenants: list[Tenant] = []
    for name, value in entries.items():
        found = _ENTRY.fullmatch(value) if isinstance(value, str) else None
        if found is None or not NAME.fullmatch(name):
            raise BadKeys(f'entry {name[:80]!r} is not NAME = "blake2b:HASH:TENANT", as `kvblend keys add` writes it')
        tenants.append(Tenant(name, bytes.fromhex(found[1]), found[2], found[3] is not None))
    for what in ("digest", "id"):
        values = [getattr(tenant, what) for tenant in tenants]
        if twice := next((one for one in tenants if values.count(getattr(one, what)) > 1), None):
            raise BadKeys(f"entry {twice.name!r} has the {'key' if what == 'digest' else 'tenant'} of another entry")
    return tenants


class KeyRing:
    """All keys that open a server. `replace` changes them while it runs."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = tuple(tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._tenants

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """From now on these keys count, and no others."""
        self._tenants = tuple(tenants)

    def find(self, key: str) -> Tenant | None:
        """Whose key it is. Takes as long whichever entry fits, and if none does."""
        digest, found = digest_of(key), None
        for tenant in self._tenants:
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        return found


def read_token(authorization: Sequence[str], subprotocols: Iterable[str] = ()) -> str | None:
    """The key in the `Authorization` headers, else in the subprotocols offered; None where it is not said just once."""
    if authorization:
        scheme, _, token = authorization[0].partition(" ")
        fine = len(authorization) == 1 and scheme.lower() == "bearer"
        return _checked(token.strip()) if fine else None
    offered = [one.removeprefix(BEARER_SUBPROTOCOL) for one in subprotocols if one.startswith(BEARER_SUBPROTOCOL)]
    if len(offered) != 1 or len(offered[0]) > 2 * KEY_CHARS_MAX:
        return None
    try:
        padded = offered[0] + "=" * (-len(offered[0]) % 4)
        return _checked(base64.b64decode(padded, altchars=b"-_", validate=True).decode("utf-8"))
    except (binascii.Error, ValueError):
        return None


def _checked(token: str) -> str | None:
    return token if 1 <= len(token) <= KEY_CHARS_MAX else None
