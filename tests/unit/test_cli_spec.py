"""The names that commands accept, and the supervisor's configuration made from a stack's specification."""

from __future__ import annotations

import configparser
import shlex
import sys
from pathlib import Path

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.errors import CliError, UnknownTarget
from services.cli.home import Home
from services.cli.settings import CliSettings
from services.cli.spec import STOP_WAIT_S, StackSpec, parse_scale, select
from services.cli.supervisor_config import Binaries, render_config, service_environment
from services.cli.up import make_spec
from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.prefill.settings import PrefillSettings
from shared.protocol.subjects import STAGES, Stage

BINARIES = Binaries(Path(sys.executable), Path("/bin/nats-server"), Path("/bin/valkey-server"))


def spec(**counts: int) -> StackSpec:
    return StackSpec(
        stack_id="id",
        model="m",
        nats_url="nats://user:hunter2@127.0.0.1:4222",
        redis_url="redis://:hunter3@127.0.0.1:6380/0",
        servers=("nats", "valkey"),
        nats_port=4222,
        redis_port=6380,
        gateway_port=8000,
        counts={stage: counts.get(stage, 1) for stage in STAGES},
    )


def programs(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    return {
        name.removeprefix("program:"): dict(parser[name]) for name in parser.sections() if name.startswith("program:")
    }


def render(stack: StackSpec, root: Path = Path("/s")) -> dict[str, dict[str, str]]:
    return programs(render_config(stack, Home(root), BINARIES))


@settings(deadline=None)
@given(stage=st.sampled_from(STAGES), before=st.integers(0, 6), after=st.integers(0, 6))
def test_scaling_a_stage_changes_no_other_program(stage: Stage, before: int, after: int) -> None:
    old = render(spec().scaled(stage, before))
    new = render(spec().scaled(stage, after))
    kept = old.keys() & new.keys()
    assert {name: old[name] for name in kept} == {name: new[name] for name in kept}
    assert new.keys() ^ old.keys() == {f"{stage}-{n}" for n in range(min(before, after), max(before, after))}


def test_every_instance_is_a_program_with_its_own_name_and_gateways_take_successive_ports() -> None:
    rendered = render(spec(gateway=3, decode=2))
    assert list(rendered) == spec(gateway=3, decode=2).programs()
    assert rendered["decode-1"]["environment"] == 'HEADRACE_INSTANCE="decode-1"'
    assert rendered["decode-1"]["command"] == f"{sys.executable} -m services.decode"
    assert [rendered[f"gateway-{n}"]["environment"].split("HEADRACE_PORT=")[1] for n in range(3)] == [
        '"8000"',
        '"8001"',
        '"8002"',
    ]


@settings(deadline=None)
@given(stage=st.sampled_from(STAGES), count=st.integers(1, 5), data=st.data())
def test_a_spare_is_one_more_program_and_changes_no_other(stage: Stage, count: int, data: st.DataObject) -> None:
    whole = spec().scaled(stage, count)
    spared = whole.sparing(stage, data.draw(st.integers(0, count - 1)))
    old, new = render(whole), render(spared)
    assert {name: new[name] for name in old} == old
    assert new.keys() - old.keys() == {f"{stage}-spare"}
    assert list(new) == spared.programs()
    assert spared.without_spare(stage) == whole
    assert spared.instances(stage) == whole.instances(stage)


def test_a_spare_gateway_listens_where_the_one_does_that_it_stands_in_for() -> None:
    rendered = render(spec(gateway=3).sparing("gateway", 1))
    assert rendered["gateway-spare"]["environment"] == 'HEADRACE_INSTANCE="gateway-spare",HEADRACE_PORT="8001"'


def test_a_stack_that_an_older_version_wrote_has_no_spares_and_its_stop_wait() -> None:
    written = msgspec.to_builtins(spec())
    del written["spares"], written["stop_wait_s"]
    assert msgspec.convert(written, StackSpec) == spec()


@pytest.mark.parametrize(("drain_s", "wait_s"), [("0.5", 35), ("20", 35), ("20.5", 36), ("60", 75), ("600", 615)])
def test_instances_may_drain_as_long_as_they_were_told_whatever_the_environment_of_later_commands(
    drain_s: str, wait_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_DRAIN_S", drain_s)
    kept = msgspec.json.encode(make_spec(CliSettings(), {}))
    monkeypatch.delenv("HEADRACE_DRAIN_S")
    rendered = render(msgspec.json.decode(kept, type=StackSpec).scaled("gateway", 2))
    waits = {name: int(program["stopwaitsecs"]) for name, program in rendered.items()}
    assert {waits.pop(server) for server in ("nats", "valkey")} == {STOP_WAIT_S}
    assert set(waits.values()) == {wait_s}


def test_the_longest_drain_that_is_expected_by_default_is_that_of_the_services() -> None:
    services = (GatewaySettings, PrefillSettings, DecodeSettings)
    longest = max(service.model_fields["drain_s"].default for service in services)
    assert CliSettings.model_fields["drain_s"].default == longest


@pytest.mark.parametrize("settings_of", [CliSettings, GatewaySettings, PrefillSettings, DecodeSettings])
def test_a_drain_without_a_sensible_bound_is_refused(
    settings_of: type[CliSettings | GatewaySettings | PrefillSettings | DecodeSettings],
) -> None:
    assert settings_of(drain_s=600).drain_s == 600
    with pytest.raises(pydantic.ValidationError):
        settings_of(drain_s=601)


def test_the_configuration_holds_no_credentials() -> None:
    text = render_config(spec(), Home(Path("/s")), BINARIES)
    assert "hunter" not in text
    assert "SECRET" not in text


def test_external_servers_are_not_started() -> None:
    external = msgspec.structs.replace(spec(), servers=())
    assert not {"nats", "valkey"} & render(external).keys()


def test_blanks_in_paths_survive() -> None:
    rendered = render(spec(), Path("/a b/c"))
    assert shlex.split(rendered["nats"]["command"])[-1] == "/a b/c/nats"
    assert rendered["nats"]["stdout_logfile"] == "/a b/c/logs/nats.log"


def test_services_get_the_stacks_variables_over_the_callers() -> None:
    inherited = {"PATH": "/bin", "OMP_NUM_THREADS": "64", "HEADRACE_MODEL": "other", "HEADRACE_DTYPE": "fp32"}
    environment = service_environment(spec(), "s3cret", 1, inherited)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert (environment["HEADRACE_MODEL"], environment["HEADRACE_DTYPE"]) == ("m", "fp32")
    assert environment["HEADRACE_SECRET"] == "s3cret"


def test_a_secret_that_the_caller_shares_between_machines_is_kept_and_ports_of_one_process_are_not() -> None:
    environment = service_environment(spec(), "ours", 1, {"HEADRACE_SECRET": "shared", "HEADRACE_METRICS_PORT": "9100"})
    assert environment["HEADRACE_SECRET"] == "shared"
    assert "HEADRACE_METRICS_PORT" not in environment


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("decode", ["decode-0", "decode-1"]),
        ("decode#1", ["decode-1"]),
        ("decode-0", ["decode-0"]),
        ("nats", ["nats"]),
    ],
)
def test_targets_name_a_stage_an_instance_or_a_server(target: str, names: list[str]) -> None:
    assert select(spec(decode=2), target) == names


@pytest.mark.parametrize("target", ["decode#2", "decoder", "nats#0", "", "decode#-1", "draft", "decode#0;x", "redis"])
def test_a_wrong_target_is_refused_with_what_there_is(target: str) -> None:
    with pytest.raises(UnknownTarget, match=r"there are|running are"):
        select(spec(decode=2, draft=0), target)


@pytest.mark.parametrize("text", ["decode", "decode=", "decode=-1", "decode=1.5", "=2", "deocde=2", "decode=65"])
def test_a_wrong_scale_is_refused(text: str) -> None:
    with pytest.raises(UnknownTarget):
        parse_scale(text)


def test_a_spare_is_named_and_belongs_to_its_stage() -> None:
    spared = spec(decode=2).sparing("decode", 0)
    assert select(spared, "decode#spare") == ["decode-spare"]
    assert select(spared, "decode") == ["decode-0", "decode-1", "decode-spare"]
    with pytest.raises(UnknownTarget):
        select(spec(decode=2), "decode#spare")


def test_a_scale_names_stage_and_count() -> None:
    assert parse_scale("decode=2") == ("decode", 2)
    assert parse_scale("kvstore=0") == ("kvstore", 0)


@pytest.mark.parametrize("name", ["a" * 200, "with;semicolon", 'with"quote', "with#hash", "100%"])
def test_a_state_directory_that_the_supervisor_could_not_use_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CliError, match="HEADRACE_HOME"):
        Home.open(tmp_path / name)


def test_the_secret_is_made_once_and_private(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = Home.open(tmp_path_factory.mktemp("home"))  # the path to its socket must be short
    secret = home.secret()
    assert len(secret) == 64
    assert home.secret() == secret
    assert (home.root / "secret").stat().st_mode & 0o777 == 0o600
    assert home.root.stat().st_mode & 0o777 == 0o700
