"""`kvsluice doctor`: what is wanted, its text, its document, and wrong use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_machine import (
    CPU_BUILD,
    FACTS,
    PAGES,
    SMALL,
)

from kvsluice.connector import OffloadConfig
from kvsluice.connector.cli import main
from kvsluice.connector.doctor import Machine, Pages, Wanted
from kvsluice.tiers.errors import ConfigError


def test_a_configuration_says_what_is_wanted():
    config = OffloadConfig.from_dict(
        {
            "tiers": [{"type": "host", "capacity": "8GiB"}],
            "device_copy": "torch",
            "device_staging_bytes": "32MiB",
            "pin_memory": "off",
            "staging_bytes": "2GiB",
        }
    )
    wanted = Wanted.by(config, PAGES)
    assert (wanted.device_copy, wanted.device_staging_bytes, wanted.pin_memory) == ("torch", 32 << 20, "off")
    assert wanted.region_bytes == 10 << 30
    assert wanted.num_slots * PAGES.slot_bytes == 1 << 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pages(page_bytes=0), "page_bytes must be at least 1, got 0"),
        (lambda: Pages(num_layers=-1), "num_layers must be at least 1, got -1"),
        (lambda: Pages(page_bytes=1 << 20, num_layers=64), "has 2147483648 bytes: up to 1073741824 are tried"),
        (lambda: Wanted(device=torch.device("meta")), "device 'meta': only cpu and cuda"),
        (lambda: Wanted(staging_bytes=4096), "staging_bytes 4096 holds no chunk: one takes 33554432 bytes"),
    ],
)
def test_what_cannot_be_examined_is_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# ---- the command -----------------------------------------------------------------------------


def words(text: str) -> str:
    """Without a table's line breaks and spaces."""
    return " ".join(text.split())


def test_the_command_runs_on_this_machine_as_it_is(capsys):
    code = main(["doctor", "--json", *SMALL])
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert code == (1 if document["problems"] else 0)
    assert document["device_path"]["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert document["device_path"]["copies"]["same_bytes"] is True
    assert "doctor: copying chunks" in err


def test_on_the_cpu_nothing_is_wrong_with_this_machine(capsys):
    assert main(["doctor", "--device", "cpu", *SMALL]) == 0
    out = words(capsys.readouterr().out)
    assert "the path in host memory, as asked for" in out
    assert "stores plain copy" in out
    assert "nothing is wrong" in out


def test_the_text_of_a_gpu_with_a_fault_names_it_and_what_to_do(there, capsys, monkeypatch):
    there.facts = [replace(FACTS, pcie_width=8)]
    there.plain = 26e9
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    assert main(["doctor", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert "doctor: pinning 1 GiB of host memory" in err
    text = words(out)
    assert "ok device cuda:0: NVIDIA H200, 141 GiB" in text
    assert "problem pcie generation 5 of 5, 8 of 16 lanes: 31.5 GB/s each way at most; the GPU and its slot can" in text
    assert "-> reseat the card" in text
    assert "stores plain copy 26" in text
    assert "stores batched 9 35% 0 stores triton 46 177% 2 taken" in text
    assert "loads torch 30 115% any" in text
    assert text.endswith("1 problem")


KEYS = {
    "": {"level", "problems", "notes", "device_path"},
    "device_path": {
        *(
            "findings",
            "device",
            "settings",
            "pages",
            "torch",
            "gpus_in_sight",
            "packages",
            "memlock",
            "memory_bytes",
            "gpu",
        ),
        *("numa_nodes", "region", "copies"),
    },
    "device_path.settings": {"device_copy", "device_staging_bytes", "pin_memory", "region_bytes"},
    "device_path.pages": {"page_bytes", "num_layers", "blocks_per_chunk", "chunk_bytes"},
    "device_path.torch": {"version", "cuda", "num_devices", "unavailable"},
    "device_path.packages": {"cuda-bindings", "triton", "nvidia-ml-py"},
    "device_path.memlock": {"soft_bytes", "hard_bytes"},
    "device_path.gpu": {
        *("name", "uuid", "pci_bus_id", "numa_node", "num_sms", "memory_bytes", "driver_version", "cuda_version"),
        *("pcie_generation", "pcie_width", "pcie_max_generation", "pcie_max_width", "notes"),
        *("pcie_generation_before", "pcie_width_before", "pcie_bytes_per_s", "pcie_max_bytes_per_s"),
    },
    "device_path.region": {
        *("bytes", "pinned", "refused", "register_s", "release_s", "numa_node", "pages_by_node"),
    },
    "device_path.copies": {"refused", "failed", "same_bytes", "stores", "loads"},
    "device_path.copies.stores": {
        *("way", "multiprocessors", "why", "bytes_per_s", "plain_bytes_per_s", "share_of_plain", "queue_s", "ways"),
    },
}
"""By path, the keys of every document that has something there: others build on them."""


@pytest.mark.parametrize("gpu", [True, False])
def test_the_document_has_the_keys_that_are_promised(there, capsys, monkeypatch, gpu):
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    if not gpu:
        there.build = CPU_BUILD
    assert main(["doctor", "--json", *SMALL, *([] if gpu else ["--device", "cpu"])]) == 0
    document = json.loads(capsys.readouterr().out)
    for path, keys in KEYS.items():
        value = document
        for name in path.split(".") if path else ():
            value = value[name]
        if path == "device_path.gpu" and not gpu:
            assert value is None
            continue
        assert set(value) == keys, path
    ways = document["device_path"]["copies"]["loads"]["ways"]
    assert set(ways[0]) == {"way", "multiprocessors", "bytes_per_s", "share_of_plain", "unusable"}
    assert set(document["device_path"]["findings"][0]) == {"name", "level", "text", "remedy"}
    assert document["device_path"]["memlock"] == {"soft_bytes": 8 << 20, "hard_bytes": "unlimited"}


def test_the_document_of_a_gpu_that_is_not_there_is_complete(there, capsys, monkeypatch):
    there.build, there.sightings = CPU_BUILD, ()
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    assert main(["doctor", "--device", "cuda", "--json"]) == 1
    section = json.loads(capsys.readouterr().out)["device_path"]
    assert set(section) == KEYS["device_path"]
    assert (section["device"], section["region"], section["copies"]) == (None, None, None)


def test_every_key_of_the_document_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "device-path.md").read_text(encoding="utf-8")
    told = {key for keys in KEYS.values() for key in keys} | {"share_of_plain", "unusable"}
    missing = {key for key in told if f"`{key}`" not in text}
    assert not missing


def test_every_line_is_documented(there):
    text = (Path(__file__).parents[2] / "docs" / "device-path.md").read_text(encoding="utf-8")
    section = there.examine()
    names = {finding.name for finding in section.findings}
    names |= {"packages", "gpu facts", "device_copy", "copies", "way triton"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_a_configuration_file_gives_settings_and_the_chunks_size(there, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Machine, "this", lambda: there.machine)
    path = tmp_path / "c.json"
    values = {
        "tiers": [{"type": "host", "capacity": "64MiB"}],
        "staging_bytes": "1MiB",
        "tokens_per_chunk": 32,
        "device_copy": "torch",
    }
    path.write_text(json.dumps(values))
    assert main(["doctor", str(path), "--page-bytes", "4KiB", "--layers", "2", "--json"]) == 0
    section = json.loads(capsys.readouterr().out)["device_path"]
    assert section["pages"]["blocks_per_chunk"] == 2
    assert section["settings"]["region_bytes"] == 65 << 20
    assert section["region"]["bytes"] == 1 << 20
    assert section["copies"]["stores"]["way"] == "torch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{here}/none.json"], "configuration file '{here}/none.json'"),
        (["{here}/wrong.json"], "device_copy is 'sideways'"),
        (["--device", "elsewhere"], "--device 'elsewhere': give cuda, cuda:1 or cpu"),
        (["--device", "meta"], "device 'meta': only cpu and cuda are supported"),
        (["--page-bytes", "two"], "--page-bytes 'two': a size is"),
        (["--layers", "0"], "num_layers must be at least 1, got 0"),
        (["--blocks-per-chunk", "0"], "blocks_per_chunk must be at least 1, got 0"),
        (["--page-bytes", "1GiB"], "are tried"),
    ],
)
def test_wrong_use_is_one_line_on_stderr_and_exit_code_2(tmp_path, capsys, arguments, message):
    wrong = {"tiers": [{"type": "host", "capacity": "1GiB"}], "device_copy": "sideways"}
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    assert main(["doctor", *(argument.format(here=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert message.format(here=tmp_path) in line
