"""The state directory of a stack: its files, the secret, and the lock that lets one command change it at a time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from services.cli.errors import CliError, StackNotRunning, StackRunning
from services.cli.spec import StackSpec

_MAX_SOCKET_PATH = 90
"""Unix socket paths end at 104 to 108 bytes, and the supervisor appends its process id while it binds."""


@dataclass(frozen=True)
class Home:
    """Paths inside one state directory (mode 700)."""

    root: Path

    @classmethod
    def open(cls, root: Path) -> Home:
        """Create it where needed. Raises CliError when it cannot be used."""
        root = root.expanduser().absolute()
        if len(str(root / "supervisor.sock")) > _MAX_SOCKET_PATH or any(c in str(root) for c in "\n;#%\"'"):
            raise CliError(f"HEADRACE_HOME {root} is too long or has quotes, ; # or % in it; choose another directory")
        home = cls(root)
        try:
            for directory in (root, home.logs, home.nats_store, home.valkey_data):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CliError(f"cannot create {root}: {error.strerror}; set HEADRACE_HOME") from error
        return home

    @property
    def socket(self) -> Path:
        return self.root / "supervisor.sock"

    @property
    def config(self) -> Path:
        return self.root / "supervisord.conf"

    @property
    def pidfile(self) -> Path:
        return self.root / "supervisord.pid"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def nats_store(self) -> Path:
        return self.root / "nats"

    @property
    def valkey_data(self) -> Path:
        return self.root / "valkey"

    def log_of(self, program: str) -> Path:
        return self.logs / f"{program}.log"

    def save_spec(self, spec: StackSpec) -> None:
        self._write_private("stack.json", msgspec.json.format(msgspec.json.encode(spec), indent=2))

    def load_spec(self) -> StackSpec | None:
        """What the last `up` wrote; None when there is nothing readable."""
        try:
            return msgspec.json.decode((self.root / "stack.json").read_bytes(), type=StackSpec)
        except (OSError, msgspec.MsgspecError):
            return None

    def require_spec(self) -> StackSpec:
        spec = self.load_spec()
        if spec is None:
            raise StackNotRunning(f"no stack is running here ({self.root}); start one with `headrace up`")
        return spec

    def drop_spec(self) -> None:
        (self.root / "stack.json").unlink(missing_ok=True)

    def write_config(self, text: str) -> None:
        self._write_private(self.config.name, text.encode())

    def secret(self) -> str:
        """The secret that peers of the KV plane share: made once, readable by its owner alone."""
        path = self.root / "secret"
        if not path.exists():
            self._write_private(path.name, secrets.token_hex(32).encode())
        return path.read_text("ascii").strip()

    @contextmanager
    def changing(self, wait_s: float = 0.2) -> Iterator[None]:
        """Held while the set of processes changes. Raises StackRunning when another command holds it for longer."""
        lock = FileLock(self.root / "change.lock")
        try:
            lock.acquire(timeout=wait_s)
        except Timeout as error:
            raise StackRunning(f"another headrace command is changing this stack ({self.root}); try again") from error
        try:
            yield
        finally:
            lock.release()

    def _write_private(self, name: str, data: bytes) -> None:
        """Whole or not at all, and never readable by others."""
        temporary = self.root / f".{name}.new"
        temporary.touch(mode=0o600)
        temporary.write_bytes(data)
        temporary.replace(self.root / name)
