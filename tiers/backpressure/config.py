"""A gate from the `backpressure` dict of a configuration.

    {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "ThrottledDropPolicy",
     "cooldown_s": 0.5, "ramp_factor": 3.0}

Both classes are named shortly (one of this package) or by a dotted path (anybody's subclass). Every
other key is an argument of one of the two, told apart by their constructors, or one of `Signals`;
`detector_args`, `policy_args` and `signals` hold the same arguments sorted by owner, for names that
two of them take.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeVar, cast

from kvsluice.tiers.backpressure.base import BackpressureDetector, BackpressurePolicy, default_policy_class
from kvsluice.tiers.backpressure.ema import EMABackpressureDetector
from kvsluice.tiers.backpressure.gate import Gate, Signals, max_fixed_cost_s
from kvsluice.tiers.backpressure.policies import DropStorePolicy, ThrottledDropPolicy
from kvsluice.tiers.errors import ConfigError

__all__ = ["INHERIT", "build_gate", "merge_backpressure"]

INHERIT: Final[Mapping[str, object]] = MappingProxyType({})
"""Stands for a tier's `backpressure` where the tier says nothing; told from an explicit `{}` by identity."""

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

_DETECTORS: Final[Mapping[str, type[BackpressureDetector]]] = {"EMABackpressureDetector": EMABackpressureDetector}
_POLICIES: Final[Mapping[str, type[BackpressurePolicy]]] = {
    "DropStorePolicy": DropStorePolicy,
    "ThrottledDropPolicy": ThrottledDropPolicy,
}
_NESTED: Final = ("detector_args", "policy_args", "signals")
_OWN_KEYS: Final = ("backpressure_cls", "policy_cls", *_NESTED)
_GIVEN_BY_US: Final = frozenset({"policy", "clock"})
_SECRET: Final = re.compile(r"secret|token|passw|credential|(^|_)key", re.IGNORECASE)


class _Factory(Protocol[_T_co]):
    """A constructor whose arguments are known only when it is called."""

    def __call__(self, **arguments: object) -> _T_co: ...


def merge_backpressure(
    common: Mapping[str, object] | None, own: Mapping[str, object] | None = INHERIT
) -> dict[str, object] | None:
    """A tier's own `backpressure` laid over the common one, field by field.

    Args:
        common: the top-level dict; None where gates are off for tiers that do not say otherwise.
        own: the tier's dict; None switches its gate off; `INHERIT` (the default) takes the common one.
            An argument replaces the common one of its name, whether either stands in `detector_args`,
            `policy_args` or `signals` or beside them.

    Returns:
        A new dict for `build_gate`, or None for no gate. Neither argument is changed.

    Raises:
        ConfigError: something that must be a mapping is none.
    """
    if own is None or (own is INHERIT and common is None):
        return None
    merged: dict[str, object] = dict(_mapping({} if common is None else common, "backpressure"))
    nested = {name: dict(_mapping(merged.pop(name, {}), f"backpressure.{name}")) for name in _NESTED}
    for key, value in _mapping(own, "a tier's backpressure").items():
        if key not in _NESTED:
            for arguments in nested.values():
                arguments.pop(key, None)
            merged[key] = value
    for name in _NESTED:
        for key, value in _mapping(own.get(name, {}), f"a tier's backpressure.{name}").items():
            # The tier's own flat argument stays, so that build_gate can say that it is given twice.
            if key not in own:
                merged.pop(key, None)
            nested[name][key] = value
        if nested[name]:
            merged[name] = nested[name]
    return merged


def build_gate(
    config: Mapping[str, object] | None,
    *,
    tier_type: str,
    locality: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Gate | None:
    """The gate that a `backpressure` dict describes.

    Args:
        config: see the head of this module; `{}` is the default detector with the marks for the kind
            of tier, None is no gate. Where `merge_backpressure` has been, its result.
        tier_type: `host`, `fs`, `obj`, or a stranger's own word; chooses the detector's defaults.
        locality: `LOCAL`, `REMOTE` or None, as the tier's configuration has it.
        clock: seconds; handed to detector and policy where their constructors take a `clock`.

    Raises:
        ConfigError: an unknown key (with its value and the nearest known one), an argument out of its
            range, a class that cannot be found or is none of ours, a policy that needs severity with
            a detector that has none. The message names the tier; the cause is chained.
    """
    if config is None:
        return None
    where = f"backpressure of tier {tier_type!r}"
    config = _mapping(config, where)
    detector_cls = _resolve(config, "backpressure_cls", _DETECTORS, BackpressureDetector, where)
    detector_cls = detector_cls or EMABackpressureDetector
    named_policy_cls = _resolve(config, "policy_cls", _POLICIES, BackpressurePolicy, where)
    policy_cls = named_policy_cls or default_policy_class(detector_cls)

    takes = {
        "detector_args": _parameters(detector_cls),
        "policy_args": _parameters(policy_cls),
        "signals": _parameters(Signals),
    }
    arguments = _sort_arguments(config, takes, where)
    detector_args = {**(detector_cls.default_config(tier_type, locality=locality) or {}), **arguments["detector_args"]}
    policy_args = arguments["policy_args"]

    # Without a word about the policy the choice is the detector's own.
    if named_policy_cls is not None or policy_args:
        if "policy" not in takes["detector_args"]:
            raise ConfigError(f"{where}: {detector_cls.__name__} takes no policy, got {policy_cls.__name__}")
        if "clock" in takes["policy_args"]:
            policy_args["clock"] = clock
        detector_args["policy"] = _construct(policy_cls, policy_args, where)
    if "clock" in takes["detector_args"]:
        detector_args["clock"] = clock
    signals = _construct(Signals, arguments["signals"], where)
    return Gate(
        _construct(detector_cls, detector_args, where),
        signals,
        max_fixed_cost_s=max_fixed_cost_s(tier_type, locality),
        clock=clock,
    )


def _sort_arguments(
    config: Mapping[str, object], takes: Mapping[str, frozenset[str]], where: str
) -> dict[str, dict[str, object]]:
    known = {owner: names - _GIVEN_BY_US for owner, names in takes.items()}
    found: dict[str, dict[str, object]] = {}
    for owner in _NESTED:
        found[owner] = dict(_mapping(config.get(owner, {}), f"{where}: {owner}"))
        for key, value in found[owner].items():
            if key not in known[owner]:
                raise _unknown(f"{where}: {owner}", key, value, known[owner])
    for key, value in config.items():
        if key in _OWN_KEYS:
            continue
        owners = [owner for owner in _NESTED if key in known[owner]]
        if not owners:
            raise _unknown(where, key, value, {*_OWN_KEYS, *frozenset().union(*known.values())})
        if len(owners) > 1:
            raise ConfigError(f"{where}: more than one of {owners} takes {key!r} ({value!r}): put it into one of them")
        if key in found[owners[0]]:
            raise ConfigError(f"{where}: {key!r} is given twice: {value!r}, and in {owners[0]}")
        found[owners[0]][key] = value
    return found


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a mapping, got {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{what}: keys must be strings, got {key!r}")
    return value


def _unknown(where: str, key: str, value: object, known: Iterable[str]) -> ConfigError:
    shown = "<redacted>" if _SECRET.search(key) else repr(value)
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
    hint = f"; the nearest known key is {nearest[0]!r}" if nearest else "; none is known here"
    return ConfigError(f"{where}: unknown key {key!r} ({shown}){hint}")


def _resolve(
    config: Mapping[str, object], key: str, ours: Mapping[str, type[_T]], base: type, where: str
) -> type[_T] | None:
    name = config.get(key)
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigError(f"{where}: {key} must be a class name, got {name!r}")
    if "." not in name:
        if name not in ours:
            raise _unknown_class(where, key, name, ours)
        return ours[name]
    module_name, _, class_name = name.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module_name), class_name)
    except Exception as exc:  # a stranger's module may fail with anything; all of it is said
        raise ConfigError(f"{where}: {key} {name!r} cannot be imported: {exc}") from exc
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(f"{where}: {key} {name!r} is no subclass of {base.__module__}.{base.__qualname__}")
    return cast("type[_T]", found)


def _unknown_class(where: str, key: str, name: str, ours: Iterable[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, sorted(ours), n=1, cutoff=0.0)[0]
    return ConfigError(
        f"{where}: {key} {name!r} is unknown; the nearest known name is {nearest!r}, others need a dotted path"
    )


def _parameters(cls: type) -> frozenset[str]:
    """Names that a constructor takes; one that takes `**anything` is followed to the class it hands them to."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        init = vars(base).get("__init__")
        if init is None:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return frozenset(names)


def _construct(cls: type[_T], arguments: Mapping[str, object], where: str) -> _T:
    try:
        return cast("_Factory[_T]", cls)(**arguments)
    except (TypeError, ValueError) as exc:  # a missing argument, one out of range, a policy that does not fit
        raise ConfigError(f"{where}: {cls.__name__}: {exc}") from exc
