"""Every error uniep raises. Each message names the value, the limit, the rank if it matters, and the remedy."""


class UniEPError(Exception):
    """Base of all uniep errors."""


class ConfigError(UniEPError, ValueError):
    """A configuration that cannot work, found before anything is allocated."""


class InputError(UniEPError, ValueError):
    """Bad values in the tensors of a call; raised on every rank of the group, before any row moves."""


class DTypeError(UniEPError, TypeError):
    """A tensor has a dtype that the configuration does not accept; raised on every rank of the group."""


class UnsupportedError(UniEPError):
    """A feature, device or topology that this build of uniep does not support."""


class CapacityError(UniEPError):
    """More routed rows than `max_rows` allows; the message gives rows needed and rows available."""


class PeerTimeoutError(UniEPError):
    """A peer did not arrive in time; the message names the peer, the stage, expected and seen counters."""


class ClosedError(UniEPError):
    """The Workspace was closed by the caller, or by an earlier error that the message repeats."""


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigError for an argument that is no `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")
