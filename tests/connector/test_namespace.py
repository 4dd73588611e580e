"""The namespace: every fact counts, no two values share an encoding, the salt stays hidden."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsluice.connector.namespace import Fact, ModelIdentity, Namespace, encode_fact, hash_salt, weights_digest
from kvsluice.tiers.errors import ConfigError

MODEL = ModelIdentity(
    name="org/model",
    revision="abc",
    weights_digest="00ff",
    attention_facts={"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 128},
    kv_dtype="bfloat16",
    tensor_parallel=2,
    hash_facts={"algorithm": "sha256"},
)
LAYOUT: dict[str, Fact] = {"layers": [{"name": "l0", "shape": (2, 16, 8), "strides": (128, 8, 1)}], "seed": b"\x00\x01"}


def build(
    *,
    layout_facts: dict[str, Fact] = LAYOUT,
    blocks_per_chunk: int = 16,
    tokens_per_block: int = 16,
    model: ModelIdentity = MODEL,
    salt: str | None = "a salt",
    weights_version: str | int | None = 1,
    format_version: int = 1,
) -> Namespace:
    return Namespace.build(
        layout_facts=layout_facts,
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_block=tokens_per_block,
        model=model,
        salt=salt,
        weights_version=weights_version,
        format_version=format_version,
    )


def other_model(**changes: object) -> ModelIdentity:
    return dataclasses.replace(MODEL, **changes)  # type: ignore[arg-type]


CHANGED: dict[str, Callable[[], Namespace]] = {
    "layer name": lambda: build(layout_facts={**LAYOUT, "layers": [{"name": "l1"}]}),
    "layout order": lambda: build(
        layout_facts={**LAYOUT, "layers": [{"name": "l0", "shape": (2, 8, 16), "strides": (128, 8, 1)}]}
    ),
    "layout bytes": lambda: build(layout_facts={**LAYOUT, "seed": b"\x00\x02"}),
    "layout bytes as text": lambda: build(layout_facts={**LAYOUT, "seed": "0001"}),
    "layout bytes as what stands for them": lambda: build(layout_facts={**LAYOUT, "seed": {"$bytes": "0001"}}),
    "one more layout fact": lambda: build(layout_facts={**LAYOUT, "more": None}),
    "blocks_per_chunk": lambda: build(blocks_per_chunk=8),
    "tokens_per_block": lambda: build(tokens_per_block=32),
    "format_version": lambda: build(format_version=2),
    "salt": lambda: build(salt="another salt"),
    "no salt": lambda: build(salt=None),
    "empty salt": lambda: build(salt=""),
    "salt that is the hash": lambda: build(salt=hash_salt("a salt")),
    "weights_version": lambda: build(weights_version=2),
    "weights_version as text": lambda: build(weights_version="1"),
    "no weights_version": lambda: build(weights_version=None),
    "name": lambda: build(model=other_model(name="org/model2")),
    "revision": lambda: build(model=other_model(revision="abd")),
    "no revision": lambda: build(model=other_model(revision=None)),
    "weights_digest": lambda: build(model=other_model(weights_digest="00fe")),
    "revision and digest swapped": lambda: build(model=other_model(revision="00ff", weights_digest="abc")),
    "rope": lambda: build(model=other_model(attention_facts={**MODEL.attention_facts, "rope_theta": 500000.0})),
    "rope scaling": lambda: build(
        model=other_model(attention_facts={**MODEL.attention_facts, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    ),
    "kv_dtype": lambda: build(model=other_model(kv_dtype="fp8_e4m3")),
    "tensor_parallel": lambda: build(model=other_model(tensor_parallel=4)),
    "pipeline_parallel": lambda: build(model=other_model(pipeline_parallel=2)),
    "prefill_context_parallel": lambda: build(model=other_model(prefill_context_parallel=2)),
    "decode_context_parallel": lambda: build(model=other_model(decode_context_parallel=2)),
    "parallel sizes swapped": lambda: build(model=other_model(tensor_parallel=1, pipeline_parallel=2)),
    "hash algorithm": lambda: build(model=other_model(hash_facts={"algorithm": "sha256_cbor"})),
}


@pytest.mark.parametrize("change", CHANGED)
def test_each_single_change_changes_the_digest(change: str) -> None:
    assert CHANGED[change]().digest != build().digest


def test_no_two_of_the_changed_namespaces_share_a_digest() -> None:
    digests = [make().digest for make in CHANGED.values()]
    assert len(set(digests)) == len(digests)


def test_every_field_of_a_model_is_changed_by_one_of_these_tests() -> None:
    assert {field.name for field in dataclasses.fields(ModelIdentity)} <= {
        *CHANGED,
        "attention_facts",  # "rope"
        "hash_facts",  # "hash algorithm"
    }
    assert len(MODEL.facts()) == len(dataclasses.fields(ModelIdentity))


def test_the_same_facts_give_the_same_digest_whatever_their_order() -> None:
    shuffled = dict(reversed(list(LAYOUT.items())))
    assert build(layout_facts=shuffled).digest == build().digest


def test_a_digest_is_128_bits_of_hex_and_never_changes_between_releases() -> None:
    digest = build().digest
    assert len(bytes.fromhex(digest)) == 16
    # Held fast: a change of the encoding would turn every stored chunk into a miss.
    assert digest == "3cec3b7b2635f332b63914aa41aa7687"


def test_the_salt_is_in_no_text_of_a_namespace() -> None:
    namespace = build(salt="SaltOfTests")
    assert "SaltOfTests" not in repr(namespace) + json.dumps(namespace.facts)
    assert namespace.facts["salt_sha256"] == hash_salt("SaltOfTests")


def test_facts_survive_json_and_stand_for_the_same_digest() -> None:
    namespace = build(layout_facts={**LAYOUT, "$bytes": 1, "$$x": [b"", {"$bytes": b"\xff"}], "one": 1.0})
    again = Namespace.from_facts(json.loads(json.dumps(namespace.facts)))
    assert again.digest == namespace.digest
    assert pickle.loads(pickle.dumps(again)) == again


def test_changed_facts_stand_for_another_digest() -> None:
    facts = {**build().facts, "tokens_per_block": 17}
    assert Namespace.from_facts(facts).digest != build().digest


@pytest.mark.parametrize("text", ["xyz", 3])
def test_facts_with_bad_bytes_are_refused(text: Fact) -> None:
    with pytest.raises(ConfigError, match=r"\$bytes"):
        Namespace.from_facts({"layout": {"$bytes": text}})


@pytest.mark.parametrize("count", [0, -1, True])
@pytest.mark.parametrize("name", ["blocks_per_chunk", "tokens_per_block", "format_version"])
def test_a_count_below_one_is_refused_by_name_and_value(name: str, count: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {count}"):
        build(**{name: count})  # type: ignore[arg-type]


def test_a_model_without_a_size_or_a_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 0"):
        other_model(tensor_parallel=0)
    with pytest.raises(ConfigError, match="kv_dtype"):
        other_model(kv_dtype="")


# The encoding

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.binary(max_size=6),
    # Few values, so that equal ones and near ones of other types meet often.
    st.sampled_from([0, 1, 255, 256, -1, 0.0, 1.0, -0.0, "", "0", "1", b"", b"1", True, False]),
)
FACTS: st.SearchStrategy[Fact] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(alphabet="ab$", max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def identity(value: Fact) -> object:
    """A value that is equal for two facts exactly when they are the same fact; says types by name."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, identity(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("list", tuple(identity(item) for item in value))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(FACTS, FACTS)
def test_encodings_are_equal_exactly_when_the_facts_are(left: Fact, right: Fact) -> None:
    assert (encode_fact(left) == encode_fact(right)) == (identity(left) == identity(right))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(FACTS, min_size=1, max_size=4), st.data())
def test_a_list_regrouped_has_another_encoding(items: list[Fact], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(items)))
    regrouped: list[Fact] = [*items[:cut], items[cut:]]
    assert encode_fact(items) != encode_fact(regrouped) or identity(items) == identity(regrouped)
    assert encode_fact([items]) != encode_fact(items) or identity(items) == identity([items])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(FACTS)
def test_any_fact_survives_json(fact: Fact) -> None:
    namespace = build(layout_facts={"fact": fact})
    assert Namespace.from_facts(json.loads(json.dumps(namespace.facts))).digest == namespace.digest


def test_near_values_of_different_types_differ() -> None:
    values: list[Fact] = [
        1, True, "1", 1.0, b"1", [1], {"1": 1}, None, False, 0, 0.0, "", b"", [], {}, "None", [[]], [[], []], [None],
        ["a", "b"], ["ab"], [["a"], "b"], ["a", ["b"]], [["a", "b"]], {"a": "b"}, {"a": {"b": 1}}, {"ab": 1}, 2**70,
        -(2**70), 127, 128, -128, -129, "\ud800", "é", "e\u0301",
    ]  # fmt: skip
    assert len({encode_fact(value) for value in values}) == len(values)


def test_a_list_and_a_tuple_are_the_same_fact() -> None:
    assert encode_fact([1, (2, 3)]) == encode_fact((1, [2, 3]))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_place(number: float) -> None:
    with pytest.raises(ValueError, match=r"namespace\['layout'\]\['a'\]\[1\] is (nan|-?inf)"):
        build(layout_facts={"a": [0, number]})


@pytest.mark.parametrize("value", [{1, 2}, object(), {1: 2}, 1j, Path("x")])
def test_a_value_that_is_no_fact_is_refused_with_its_place(value: Fact) -> None:
    with pytest.raises(TypeError, match=r"namespace\['layout'\]\['a'\]"):
        build(layout_facts={"a": value})


# Weights

KIB = 1024


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 4 * KIB)  # 1 MiB: sampled
    (folder / "b.bin").write_bytes(b"\x07" * 100 * KIB)  # read whole
    return folder


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_the_same_weights_have_the_same_digest_wherever_they_lie(weights: Path, tmp_path: Path) -> None:
    digest = weights_digest(str(weights))
    moved = weights.rename(tmp_path / "elsewhere")
    (moved / "config.json").write_text("changed")
    (moved / "tokenizer.model").write_text("new")
    assert digest is not None
    assert weights_digest(str(moved)) == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(folder / "a.safetensors", 0),
        lambda folder: flip(folder / "a.safetensors", KIB * KIB - 1),
        lambda folder: flip(folder / "a.safetensors", (KIB - 64) * KIB * 3 // 7 + 5),
        lambda folder: flip(folder / "b.bin", 70 * KIB),
        lambda folder: (folder / "b.bin").write_bytes(b"\x07" * (100 * KIB + 1)),
        lambda folder: (folder / "b.bin").rename(folder / "c.bin"),
        lambda folder: (folder / "b.bin").unlink(),
        lambda folder: (folder / "d.gguf").write_bytes(b""),
        lambda folder: (folder / "d.pt").write_bytes(b"x"),
    ],
    ids=["first byte", "last byte", "middle sample", "small file", "size", "name", "removed", "gguf", "pt"],
)
def test_changed_weights_have_another_digest(weights: Path, change: Callable[[Path], object]) -> None:
    before = weights_digest(str(weights))
    change(weights)
    assert weights_digest(str(weights)) != before


def test_at_most_eight_samples_are_read_of_a_file_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvsluice.connector.namespace as module

    path = tmp_path / "huge.safetensors"
    with path.open("wb") as stream:
        stream.truncate(2**36)  # sparse: no byte of it is on the disk
    asked: list[int] = []
    real = module._sample_offsets  # noqa: SLF001 - the bound is what is tested

    def recording(size_bytes: int) -> list[int]:
        offsets = real(size_bytes)
        asked.extend(offsets)
        return offsets

    monkeypatch.setattr(module, "_sample_offsets", recording)
    assert weights_digest(str(tmp_path)) is not None
    assert len(asked) == 8
    assert (asked[0], asked[-1]) == (0, 2**36 - 64 * KIB)


def test_links_to_weights_are_followed(weights: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in weights.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert weights_digest(str(snapshot)) == weights_digest(str(weights))


def test_what_is_no_folder_with_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.bin").mkdir()
    assert weights_digest(str(tmp_path)) is None
    assert weights_digest("org/model-on-a-hub") is None
    assert weights_digest(str(tmp_path / "config.json")) is None
