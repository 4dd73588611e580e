"""Gates from configuration dicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import types

import pytest

from kvsluice.tiers.backpressure import (
    INHERIT,
    BackpressureDetector,
    BackpressurePolicy,
    DropAccountingPolicy,
    DropStorePolicy,
    EMABackpressureDetector,
    Signals,
    Spent,
    ThrottledDropPolicy,
    build_gate,
    merge_backpressure,
)
from kvsluice.tiers.errors import ConfigError

MIB = 1 << 20


class LimitDetector(BackpressureDetector):
    """A stranger's detector: no severity, a required argument, defaults of its own."""

    def __init__(self, limit, color="red", policy=None, clock=None) -> None:
        super().__init__(policy=policy)
        if limit < 0:
            raise ValueError(f"limit below 0: {limit}")
        self.limit, self.color, self.clock = limit, color, clock

    def on_store_completed(self, elapsed_s, num_bytes) -> None:
        pass

    def is_under_pressure(self) -> bool:
        return False

    def reset(self) -> None:
        pass

    @classmethod
    def default_config(cls, tier_type, *, locality=None):
        return {"color": f"{tier_type}/{locality}"}


class EagerDetector(EMABackpressureDetector):
    """Hands on what it does not know."""

    def __init__(self, eagerness=1, **kwargs) -> None:
        super().__init__(**kwargs)
        self.eagerness = eagerness


class FixedDetector(LimitDetector):
    def __init__(self, limit=0) -> None:
        super().__init__(limit)

    @classmethod
    def default_config(cls, tier_type, *, locality=None):
        return None


class AgingPolicy(DropAccountingPolicy):
    def __init__(self, limit=1, max_age_s=2.0, clock=None) -> None:
        super().__init__()
        self.limit, self.max_age_s, self.clock = limit, max_age_s, clock

    def should_store(self, detector) -> bool:
        return True


@pytest.fixture(autouse=True)
def strangers_module(monkeypatch):
    module = types.ModuleType("strangers_gates")
    for cls in (LimitDetector, EagerDetector, FixedDetector, AgingPolicy):
        setattr(module, cls.__name__, cls)
    module.not_a_class = 7
    monkeypatch.setitem(sys.modules, "strangers_gates", module)


def at_zero() -> float:
    return 0.0


def gate(config, tier_type="fs", locality=None):
    """The detector of the gate, which is what most arguments are for."""
    built = build_gate(config, tier_type=tier_type, locality=locality, clock=at_zero)
    return None if built is None else built.detector


def highest_admitted(detector: BackpressureDetector) -> float:
    """The largest s/MiB of one store that is no pressure yet, to a tenth of a millisecond."""
    for step in itertools.count(1):
        detector.reset()
        for _ in range(11):
            detector.on_store_completed(step / 1e4, MIB)
        if detector.is_under_pressure():
            return (step - 1) / 1e4
    raise AssertionError("no end to the samples")


def test_no_configuration_is_no_gate():
    assert gate(None) is None


def test_an_empty_configuration_is_the_default_gate_with_the_marks_of_its_tier():
    detector = gate({})
    assert type(detector) is EMABackpressureDetector
    assert type(detector.policy) is ThrottledDropPolicy
    assert highest_admitted(detector) == pytest.approx(0.010, abs=1.1e-4)


@pytest.mark.parametrize(("tier_type", "locality"), [("obj", None), ("fs", "remote")])
def test_defaults_follow_tier_type_and_locality(tier_type, locality):
    assert highest_admitted(gate({}, tier_type, locality)) == pytest.approx(0.050, abs=1.1e-4)


def test_a_field_overrides_the_default_of_its_name_only():
    detector = gate({"high_water_s": 0.02})
    assert highest_admitted(detector) == pytest.approx(0.02, abs=1.1e-4)
    detector.reset()
    for _ in range(3):
        detector.on_store_failed()
    assert detector.is_under_pressure()


def test_a_default_can_be_overridden_with_null():
    detector = gate({"failure_threshold": None})
    for _ in range(100):
        detector.on_store_failed()
    assert not detector.is_under_pressure()


def test_vllm_s_form_with_short_names_and_flat_arguments_works():
    config = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "ThrottledDropPolicy",
        "high_water_s": 1,
        "low_water_s": 0.5,
        "alpha": 1.0,
        "warmup_completions": 0,
        "ramp_factor": 4,
    }
    before = dict(config)
    detector = gate(config)
    detector.on_store_completed(3.0, MIB)
    assert [detector.should_store(1) for _ in range(4)] == [True, False, True, False]
    assert config == before


def test_nested_arguments_are_the_same_arguments():
    detector = gate(
        {
            "detector_args": {"high_water_s": 1.0, "warmup_completions": 0, "alpha": 1.0},
            "policy_args": {"ramp_factor": 4.0},
        }
    )
    detector.on_store_completed(3.0, MIB)
    assert [detector.should_store(1) for _ in range(4)] == [True, False, True, False]


def test_a_policy_argument_alone_configures_the_default_policy():
    detector = gate({"ramp_factor": 1.0, "warmup_completions": 0, "alpha": 1.0})
    detector.on_store_completed(0.02, MIB)
    assert not detector.should_store(1)


def test_the_clock_reaches_the_detector_and_a_policy_that_takes_one():
    detector = gate({"backpressure_cls": "strangers_gates.LimitDetector", "limit": 1})
    assert detector.clock is at_zero
    detector = gate({"policy_cls": "strangers_gates.AgingPolicy", "max_age_s": 5.0})
    assert (detector.policy.clock, detector.policy.max_age_s) == (at_zero, 5.0)
    detector.update(-4.0, MIB)
    assert detector.stats["completions"] == 1


def test_a_dotted_name_is_anybody_s_class_with_its_own_defaults():
    detector = gate({"backpressure_cls": "strangers_gates.LimitDetector", "limit": 3}, "tape", "REMOTE")
    assert type(detector) is LimitDetector
    assert (detector.limit, detector.color) == (3, "tape/REMOTE")
    assert type(detector.policy) is DropStorePolicy


def test_a_constructor_that_hands_arguments_on_takes_those_of_its_base_too():
    detector = gate({"backpressure_cls": "strangers_gates.EagerDetector", "eagerness": 2, "high_water_s": 0.02})
    assert detector.eagerness == 2
    assert highest_admitted(detector) == pytest.approx(0.02, abs=1.1e-4)


def test_null_class_names_are_the_defaults():
    detector = gate({"backpressure_cls": None, "policy_cls": None})
    assert type(detector) is EMABackpressureDetector
    assert type(detector.policy) is ThrottledDropPolicy


@pytest.mark.parametrize("policy", ["DropStorePolicy", "ThrottledDropPolicy"])
def test_every_shipped_policy_has_a_short_name(policy):
    assert type(gate({"policy_cls": policy}).policy).__name__ == policy


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"high_watr_s": 0.5}, ["'fs'", "'high_watr_s'", "0.5", "'high_water_s'"]),
        ({"ramp_facto": 9}, ["'ramp_facto'", "9", "'ramp_factor'"]),
        ({"backpresure_cls": "X"}, ["'backpresure_cls'", "'X'", "'backpressure_cls'"]),
        ({"detector_args": {"alhpa": 0.5}}, ["detector_args", "'alhpa'", "0.5", "'alpha'"]),
        ({"policy_args": {"alpha": 0.5}}, ["policy_args", "'alpha'", "0.5", "'ramp_factor'"]),
        ({"policy_cls": "DropStorePolicy", "ramp_factor": 9}, ["unknown key 'ramp_factor'", "9"]),
        ({"policy_cls": "DropStorePolicy", "policy_args": {"x": 9}}, ["'x'", "9", "none is known"]),
        ({"policy": "DropStorePolicy"}, ["'policy'", "'DropStorePolicy'", "'policy_"]),
        ({"clock": 3}, ["'clock'", "3"]),
    ],
)
def test_an_unknown_key_is_named_with_its_value_and_the_nearest_known_one(config, parts):
    with pytest.raises(ConfigError) as caught:
        gate(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("key", ["secret_key", "access_key", "session_token", "password"])
def test_a_secret_that_strayed_here_is_not_repeated(key):
    with pytest.raises(ConfigError, match=key) as caught:
        gate({key: "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"alpha": 7}, ["'fs'", "EMABackpressureDetector", "alpha", "7"]),
        ({"high_water_s": 0.001}, ["low_water_s", "0.002", "0.001"]),
        ({"high_water_s": math.nan}, ["high_water_s", "nan"]),
        ({"ramp_factor": 0}, ["'fs'", "ThrottledDropPolicy", "ramp_factor", "0"]),
        ({"backpressure_cls": "strangers_gates.LimitDetector", "limit": -2}, ["LimitDetector", "limit below 0: -2"]),
        ({"backpressure_cls": "strangers_gates.LimitDetector"}, ["LimitDetector", "'limit'"]),
    ],
)
def test_an_argument_that_the_class_refuses_is_a_chained_configuration_error(config, parts):
    with pytest.raises(ConfigError) as caught:
        gate(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))


def test_throttling_with_a_detector_without_severity_names_both_classes():
    config = {"backpressure_cls": "strangers_gates.LimitDetector", "policy_cls": "ThrottledDropPolicy", "limit": 1}
    with pytest.raises(ConfigError, match=r"ThrottledDropPolicy .*LimitDetector"):
        gate(config)


def test_a_policy_for_a_detector_that_takes_none_is_refused():
    config = {"backpressure_cls": "strangers_gates.FixedDetector"}
    assert type(gate(config)) is FixedDetector
    with pytest.raises(ConfigError, match="FixedDetector takes no policy, got DropStorePolicy"):
        gate({**config, "policy_cls": "DropStorePolicy"})


@pytest.mark.parametrize("key", ["backpressure_cls", "policy_cls"])
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("no_such_module_anywhere.Detector", ModuleNotFoundError),
        ("strangers_gates.NoSuchClass", AttributeError),
        (".Relative", Exception),
    ],
)
def test_a_dotted_name_that_cannot_be_imported_is_a_chained_error(key, name, cause):
    with pytest.raises(ConfigError, match=f"{key} '{name}' cannot be imported") as caught:
        gate({key: name})
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("backpressure_cls", "strangers_gates.AgingPolicy"),
        ("backpressure_cls", "strangers_gates.not_a_class"),
        ("policy_cls", "strangers_gates.LimitDetector"),
        ("policy_cls", "builtins.dict"),
    ],
)
def test_a_dotted_name_of_something_else_is_refused(key, name):
    base = BackpressureDetector if key == "backpressure_cls" else BackpressurePolicy
    with pytest.raises(ConfigError, match=rf"{key} '{name}' is no subclass of .*{base.__name__}"):
        gate({key: name})


@pytest.mark.parametrize(
    ("key", "name", "nearest"),
    [
        ("backpressure_cls", "EMADetector", "EMABackpressureDetector"),
        ("policy_cls", "ThrottleDropPolicy", "ThrottledDropPolicy"),
        ("policy_cls", "DropPolicy", "DropStorePolicy"),
    ],
)
def test_an_unknown_short_name_is_answered_with_the_nearest(key, name, nearest):
    with pytest.raises(ConfigError, match=rf"{key} '{name}' is unknown; .*'{nearest}'"):
        gate({key: name})


def test_an_abstract_class_is_refused():
    with pytest.raises(ConfigError, match="BackpressureDetector"):
        gate({"backpressure_cls": "kvsluice.tiers.backpressure.BackpressureDetector"})


@pytest.mark.parametrize(
    "config",
    [[], "EMABackpressureDetector", {3: 4}, {"detector_args": 3}, {"policy_args": None}, {"policy_cls": 5}],
)
def test_something_of_the_wrong_kind_is_refused(config):
    with pytest.raises(ConfigError, match="must be"):
        gate(config)


def test_an_argument_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"'alpha' is given twice"):
        gate({"alpha": 0.5, "detector_args": {"alpha": 0.6}})


def test_a_name_that_both_classes_take_must_say_whose_it_is():
    config = {"backpressure_cls": "strangers_gates.LimitDetector", "policy_cls": "strangers_gates.AgingPolicy"}
    with pytest.raises(ConfigError, match=r"detector_args.*policy_args.*'limit' \(3\)"):
        gate({**config, "limit": 3})
    detector = gate({**config, "detector_args": {"limit": 3}, "policy_args": {"limit": 4}})
    assert (detector.limit, detector.policy.limit) == (3, 4)


def built(config, tier_type="fs", locality=None):
    return build_gate(config, tier_type=tier_type, locality=locality, clock=at_zero)


def test_every_signal_is_on_by_default_and_can_be_switched_off_alone():
    assert built({}).signals == Signals()
    for field in dataclasses.fields(Signals):
        off = 0.0 if field.name == "fixed_cost_s" else False
        assert built({field.name: off}).signals == dataclasses.replace(Signals(), **{field.name: off})
        assert built({"signals": {field.name: off}}).signals == built({field.name: off}).signals


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"goodput": 1}, ["goodput", "true or false", "1"]),
        ({"signals": {"in_flight": "no"}}, ["in_flight", "true or false", "'no'"]),
        ({"fixed_cost_s": -1}, ["fixed_cost_s", "-1"]),
        ({"fixed_cost_s": True}, ["fixed_cost_s", "True"]),
        ({"fixed_cost_s": "1 ms"}, ["fixed_cost_s", "'1 ms'"]),
        ({"signals": {"goodputs": True}}, ["signals", "'goodputs'", "nearest", "'goodput'"]),
        ({"inflight": False}, ["'inflight'", "nearest", "'in_flight'"]),
        ({"signals": 3}, ["signals", "mapping", "3"]),
    ],
)
def test_a_signal_that_is_none_is_refused_with_name_and_value(config, parts):
    with pytest.raises(ConfigError) as caught:
        built(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_tier_s_own_signals_lie_over_the_common_ones():
    common = {"signals": {"goodput": False, "in_flight": False}, "fixed_cost_s": 0.001}
    merged = merge_backpressure(common, {"signals": {"in_flight": True}, "fixed_cost_s": 0.002})
    assert built(merged).signals == Signals(goodput=False, fixed_cost_s=0.002)


@pytest.mark.parametrize(
    ("tier_type", "locality", "most_s"),
    [("host", None, 0.0), ("fs", None, 0.0005), ("fs", "remote", 0.030), ("obj", None, 0.030), ("obj", "LOCAL", 0.030)],
)
def test_what_may_be_learned_as_a_fixed_cost_follows_the_kind_of_tier(tier_type, locality, most_s):
    assert built({}, tier_type, locality).fixed_cost_s == most_s


def test_a_stranger_s_detector_without_a_low_mark_learns_no_fixed_cost():
    gate_of_a_stranger = built({"backpressure_cls": "strangers_gates.LimitDetector", "limit": 3}, "obj")
    assert gate_of_a_stranger.fixed_cost_s == 0.0
    gate_of_a_stranger.on_store_ended(100, Spent.alone(5.0))
    assert gate_of_a_stranger.fixed_cost_s == 0.0


@pytest.mark.parametrize(
    ("common", "own", "merged"),
    [
        (None, INHERIT, None),
        (None, None, None),
        (None, {}, {}),
        (None, {"alpha": 1}, {"alpha": 1}),
        ({}, INHERIT, {}),
        ({"alpha": 1}, INHERIT, {"alpha": 1}),
        ({"alpha": 1}, None, None),
        ({"alpha": 1}, {}, {"alpha": 1}),
        ({"alpha": 1, "cooldown_s": 2}, {"alpha": 3}, {"alpha": 3, "cooldown_s": 2}),
        ({"failure_threshold": 5}, {"failure_threshold": None}, {"failure_threshold": None}),
        (
            {"detector_args": {"alpha": 1, "cooldown_s": 2}},
            {"detector_args": {"alpha": 3}},
            {"detector_args": {"alpha": 3, "cooldown_s": 2}},
        ),
        ({"detector_args": {"alpha": 1}}, {"alpha": 3}, {"alpha": 3}),
        ({"policy_args": {"ramp_factor": 1}}, {"ramp_factor": 3}, {"ramp_factor": 3}),
        ({"ramp_factor": 1}, {"policy_args": {"ramp_factor": 3}}, {"policy_args": {"ramp_factor": 3}}),
        ({}, {"alpha": 1, "detector_args": {"alpha": 3}}, {"alpha": 1, "detector_args": {"alpha": 3}}),
    ],
)
def test_a_tier_s_own_dict_lies_over_the_common_one_field_by_field(common, own, merged):
    assert merge_backpressure(common, own) == merged


def test_merging_leaves_both_dicts_as_they_were():
    common = {"alpha": 1, "detector_args": {"cooldown_s": 2}}
    own = {"cooldown_s": 3, "policy_args": {"ramp_factor": 4}}
    merged = merge_backpressure(common, own)
    merged["policy_args"]["ramp_factor"] = 9
    assert common == {"alpha": 1, "detector_args": {"cooldown_s": 2}}
    assert own == {"cooldown_s": 3, "policy_args": {"ramp_factor": 4}}


def test_a_tier_that_says_nothing_gets_the_common_dict():
    assert merge_backpressure({"alpha": 1}) == {"alpha": 1}


@pytest.mark.parametrize(("common", "own"), [([], {}), ({}, "x"), ({"policy_args": 3}, {}), ({}, {"policy_args": 3})])
def test_merging_what_is_no_mapping_is_refused(common, own):
    with pytest.raises(ConfigError, match="must be a mapping"):
        merge_backpressure(common, own)
