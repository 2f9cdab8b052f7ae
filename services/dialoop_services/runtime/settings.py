"""Read typed settings from the environment; refuse unknown keys and report mistakes in one line.

class EnvironmentSettings(ServerSettings):
    model_config = SettingsConfigDict(env_prefix="DIALOOP_ENVIRONMENT_")
    ttl_s: float = 600.0

settings = load(EnvironmentSettings)      # reads DIALOOP_ENVIRONMENT_PORT, ..._TTL_S, DIALOOP_TOKEN
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dialoop.errors import InvalidConfig
from dialoop.import_paths import nearest
from dialoop.old_names import now_at
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_S = TypeVar("_S", bound="StrictSettings")
_OLD_IMPORT = re.compile(
    r"(?:^|\s)services\.(?:collector|config|environment|inference|learning|replay|rest|rl|runtime"
    r"|scorer|stack|trainer)\b[\w.]*"
)


class _StrictEnvironment(EnvSettingsSource):
    """The environment. Variables with the service's prefix that no field reads are reported."""

    def __call__(self) -> dict[str, Any]:
        return super().__call__() | dict.fromkeys(self._unread(), "")

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Return JSON decoded; leave other text to the field, which says what it takes."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value

    def _unread(self) -> list[str]:
        prefix = self.env_prefix.lower()
        if not prefix:
            return []
        fields = tuple(prefix + name.lower() for name in self.settings_cls.model_fields)
        nested = tuple(f"{name}{self.env_nested_delimiter}" for name in fields)
        return [
            name[len(prefix) :]
            for name in self.env_vars
            if name.startswith(prefix)
            and name not in fields
            and not (self.env_nested_delimiter and name.startswith(nested))
        ]


class StrictSettings(BaseSettings):
    """Base of all settings: set `model_config = SettingsConfigDict(env_prefix="DIALOOP_X_")`."""

    SUCCESSORS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Variables of earlier versions and their names now, both without the prefix. A key inside a
    variable, `old__key`, keeps its name unless it has a line of its own."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        env_nested_delimiter="__",
    )

    @model_validator(mode="before")
    @classmethod
    def _require_new_imports(cls, values: Any) -> Any:
        old = old_import_in(values)
        if old:
            raise ValueError(old)
        return values

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments first, then the environment, and nothing else."""
        return init_settings, _StrictEnvironment(settings_cls)


class ServerSettings(StrictSettings):
    """Where and how a service listens."""

    ROLE: ClassVar[str] = ""
    """What instances call the service; a proof has to be for it."""

    host: str = "127.0.0.1"
    """Address to listen on; any address other than loopback needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: the system chooses."""
    rest_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of REST, metrics and readable documents; 0: the system chooses; absent: none."""
    token: SecretStr = Field(default=SecretStr(""), validation_alias="DIALOOP_TOKEN")
    """Bearer token that every call must carry, one for all services, or its digest, as sha256:HEX;
    empty: none."""
    admin_token: SecretStr = Field(default=SecretStr(""), validation_alias="DIALOOP_ADMIN_TOKEN")
    """Bearer token of calls that change what others get, such as registering a template; it opens
    all other calls too; empty: `token` opens these calls."""
    token_file: Path | None = Field(default=None, validation_alias="DIALOOP_TOKEN_FILE")
    """TOML file with more tokens, each with some scopes only; read again when it changes."""
    ticket: SecretStr = Field(default=SecretStr(""), validation_alias="DIALOOP_TICKET")
    """Ticket that says which instance of a job the service is, from the stack or `dialoop ticket`;
    it calls others with proofs of that in place of the token."""
    of_run: str = Field(default="", validation_alias="DIALOOP_RUN")
    """Run whose instances may call with tickets; empty: any whose tickets this job's token
    signed."""
    tls_certificate: Path | None = Field(default=None, validation_alias="DIALOOP_TLS_CERTIFICATE")
    """PEM certificate of the service, which both servers then show: they speak TLS alone."""
    tls_key: Path | None = Field(default=None, validation_alias="DIALOOP_TLS_KEY")
    """PEM file of the certificate's key."""
    tls_ca: Path | None = Field(default=None, validation_alias="DIALOOP_TLS_CA")
    """PEM authorities that certificates of other services, and of callers, have to come from."""
    tls_mutual: bool = Field(default=False, validation_alias="DIALOOP_TLS_MUTUAL")
    """Whether callers have to show a certificate of these authorities."""
    drain_s: float = Field(default=10.0, ge=0)
    """Seconds that calls in flight may still run after the service has been asked to stop."""
    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Size of the largest request, in bytes; those that hold trajectories may be larger."""
    max_large_message_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Size of the largest request that holds trajectories, and of the largest answer, in bytes; at
    least `max_message_bytes`."""
    max_pending_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Bytes of all REST bodies together that are still coming in; more is refused."""
    max_connections: int = Field(default=2048, ge=1)
    """Connections to each of gRPC and REST; fewer where the process may open fewer files. Beyond
    it the idlest REST connection is closed, and a gRPC connection is refused."""
    max_calls: int = Field(default=8192, ge=1)
    """Calls over gRPC that run at the same time, waiting ones included; more are refused. Those
    without a right are not counted."""
    max_connection_calls: int = Field(default=1024, ge=1)
    """Calls of one gRPC connection at the same time; a client keeps more back until others end."""
    unread_s: float = Field(default=60.0, ge=0.1)
    """Seconds after which a gRPC connection is closed whose client reads nothing."""
    request_head_s: float = Field(default=10.0, gt=0)
    """Seconds in which the head of a REST request, or a new gRPC connection's, has to come."""
    request_body_s: float = Field(default=120.0, gt=0)
    """Seconds in which the body of a REST request has to come."""

    @property
    def max_answer_bytes(self) -> int:
        """Return the bytes of the largest answer, and of the largest request of any rpc."""
        return max(self.max_message_bytes, self.max_large_message_bytes)

    @property
    def joined_run(self) -> str:
        """Return the run whose registry names services that this one calls; empty: none does."""
        return ""

    @field_validator("token", "admin_token")
    @classmethod
    def _require_header_characters(cls, token: SecretStr) -> SecretStr:
        text = token.get_secret_value()
        if text.startswith("sha256:") and re.fullmatch("sha256:[0-9a-f]{64}", text) is None:
            raise ValueError("a digest is sha256: and 64 hexadecimal digits")
        if not (text.isascii() and text.replace(" ", "x").isprintable()):
            raise ValueError("the token is sent in a header: use printable ASCII only")
        return token


def load(kind: type[_S], **arguments: Any) -> _S:
    """Return the settings of `kind`; InvalidConfig names every wrong variable."""
    try:
        return kind(**arguments)
    except ValidationError as error:
        raise InvalidConfig(
            "; ".join(_sentence(kind, detail) for detail in error.errors()) + ".",
            remedy=f"Correct the settings of {kind.__name__}.",
        ) from error


def help_of(kind: type[StrictSettings]) -> str:
    """Return every variable of the settings with its default and its meaning."""
    prefix = str(kind.model_config.get("env_prefix", ""))
    lines = []
    for name, field in kind.model_fields.items():
        alias, default = field.validation_alias, field.get_default(call_default_factory=True)
        variable = alias if isinstance(alias, str) else f"{prefix}{name}".upper()
        is_plain = isinstance(default, (int, float, str, Path)) and str(default)
        lines.append(f"{variable} = {default}" if is_plain else variable)
        lines += textwrap.wrap(
            field.description or "", 96, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines)


def old_import_in(value: Any) -> str:
    """Return an error text for a value that names a module by its old import path, or "".

    `services.x` in an import path or a command was `dialoop_services.x`, and is where that is now.
    A package `services` of the user's own that has such a module is fine.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((text for item in value if (text := old_import_in(item))), "")
    match = _OLD_IMPORT.search(value) if isinstance(value, str) else None
    if match is None or _is_importable(match.group().strip()):
        return ""
    name = match.group().strip()
    new = f"dialoop_{name}"
    return f"{value!r} names {name}, which is now {now_at(new) or new}"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _sentence(kind: type[StrictSettings], detail: ErrorDetails) -> str:
    """Return what is wrong with one setting, without its value, which may be a secret."""
    prefix = str(kind.model_config.get("env_prefix", ""))
    if not detail["loc"]:
        return detail["msg"].removeprefix("Value error, ")
    field = ".".join(str(part) for part in detail["loc"])
    name = field if field.isupper() else (prefix + field).upper()
    if detail["type"] != "extra_forbidden":
        return f"{name}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    outer, *inner = field.split("__", maxsplit=1)
    if field in kind.SUCCESSORS or outer in kind.SUCCESSORS:
        new = kind.SUCCESSORS.get(field) or "__".join((kind.SUCCESSORS[outer], *inner))
        return f"{name} is now {(prefix + new).upper()}"
    near = nearest(field, kind.model_fields)
    hint = f", did you mean {(prefix + near).upper()}?" if near else ""
    return f"{name} is not a setting{hint}"
