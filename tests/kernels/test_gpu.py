"""Facts about a GPU: the right GPU's, None where they cannot be had, and a note that says why."""

# ruff: noqa: N802 - the fake has the names that NVML gave

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from kvsluice.kernels.gpu import PCIE_LANE_BYTES_PER_S, GpuFacts, Nvml, gpu_facts

DEVICE = torch.device("cuda", 0)


class FakeError(Exception):
    """As `pynvml.NVMLError`."""


def properties(**changed: object) -> SimpleNamespace:
    """What torch says of device 0: it is the second of the machine, by CUDA_VISIBLE_DEVICES."""
    given = {
        "name": "NVIDIA H200",
        "total_memory": 150_000_000_000,
        "multi_processor_count": 132,
        "uuid": "bbbb",
        "pci_domain_id": 0,
        "pci_bus_id": 0x65,
        "pci_device_id": 0,
    }
    kept = {name: value for name, value in (given | changed).items() if value is not None}
    return SimpleNamespace(**kept)


class FakeNvml:
    """A machine of two GPUs. Answers that are exceptions are raised."""

    NVMLError = FakeError

    def __init__(self, **answers: object) -> None:
        self.started = self.stopped = 0
        self.by_uuid = {"GPU-aaaa": 0, "GPU-bbbb": 1}
        self.by_pci = {"0000:17:00.0": 0, "0000:65:00.0": 1}
        self.asked_nodes: list[tuple[int, int]] = []
        self.answers: dict[str, object] = {
            "init": None,
            "shutdown": None,
            "driver": "580.159.03",
            "cuda": 13000,
            "mig": FakeError("Not Supported"),
            "uuid": "GPU-bbbb",
            "pci": SimpleNamespace(domain=0, bus=0x65, device=0),
            "generation": 1,
            "width": 16,
            "max_generation": 5,
            "max_width": 16,
            "own_node": FakeError("Not Supported"),
            "affinity": [2],
        } | answers

    def answer(self, name: str, handle: int | None = 1):
        assert self.started == self.stopped + 1, "asked while NVML was not started"
        assert handle == 1, "asked about the wrong GPU"
        value = self.answers[name]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:
        value = self.answers["init"]
        if isinstance(value, Exception):
            raise value
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.answer("shutdown")
        self.stopped += 1

    def nvmlSystemGetDriverVersion(self):
        return self.answer("driver")

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.answer("cuda")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid not in self.by_uuid:
            raise FakeError("Not Found")
        return self.by_uuid[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> int:  # noqa: N803
        if pciBusId not in self.by_pci:
            raise FakeError("Not Found")
        return self.by_pci[pciBusId]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: object) -> int:  # noqa: N803
        assert migDevice == "an instance"
        return 1

    def nvmlDeviceGetMigMode(self, handle: int):
        return self.answer("mig", handle)

    def nvmlDeviceGetUUID(self, handle: object):
        return self.answer("uuid") if handle == 1 else "MIG-bbbb"

    def nvmlDeviceGetPciInfo(self, handle: int):
        return self.answer("pci", handle)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int):
        return self.answer("generation", handle)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int):
        return self.answer("width", handle)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int):
        return self.answer("max_generation", handle)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int):
        return self.answer("max_width", handle)

    def nvmlDeviceGetNumaNodeId(self, handle: int):
        return self.answer("own_node", handle)

    def nvmlDeviceGetMemoryAffinity(self, handle: int, nodeSetSize: int, scope: int) -> Sequence[int]:  # noqa: N803
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        words = list(self.answer("affinity", handle))
        return words + [0] * (nodeSetSize - len(words))


@pytest.fixture
def sys_pci(tmp_path: Path) -> Path:
    """The kernel's view: the second GPU is on node 3."""
    for address, node in (("0000:17:00.0", 0), ("0000:65:00.0", 3)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    return tmp_path


def ask(nvml: FakeNvml, sys_pci: Path, **changed: object) -> GpuFacts:
    facts = gpu_facts(DEVICE, properties=properties(**changed), nvml=nvml, sys_pci=sys_pci)
    assert nvml.started == nvml.stopped, "NVML was started and not shut down"
    return facts


def test_all_facts_are_those_of_the_gpu_that_torch_means(sys_pci: Path) -> None:
    assert ask(FakeNvml(), sys_pci) == GpuFacts(
        name="NVIDIA H200",
        uuid="GPU-bbbb",
        pci_bus_id="0000:65:00.0",
        pcie_generation=1,
        pcie_width=16,
        pcie_max_generation=5,
        pcie_max_width=16,
        numa_node=1,
        num_sms=132,
        memory_bytes=150_000_000_000,
        driver_version="580.159.03",
        cuda_version="13.0",
        notes=(),
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"pci_domain_id": None, "pci_bus_id": None, "pci_device_id": None},
        {"uuid": None},
        {"uuid": "a uuid that NVML does not know"},
    ],
    ids=["by uuid", "by address", "by address after the uuid"],
)
def test_the_gpu_is_found_by_uuid_or_by_pci_address(sys_pci: Path, changed: dict[str, object]) -> None:
    facts = ask(FakeNvml(), sys_pci, **changed)
    assert (facts.uuid, facts.pci_bus_id, facts.pcie_max_generation) == ("GPU-bbbb", "0000:65:00.0", 5)
    assert facts.notes == ()


def test_a_gpu_that_nvml_does_not_know_still_has_what_torch_and_the_kernel_say(sys_pci: Path) -> None:
    nvml = FakeNvml()
    nvml.by_uuid.clear()
    nvml.by_pci.clear()
    facts = ask(nvml, sys_pci)
    assert (facts.name, facts.num_sms, facts.uuid, facts.numa_node) == ("NVIDIA H200", 132, "GPU-bbbb", 3)
    assert (facts.driver_version, facts.cuda_version) == ("580.159.03", "13.0")
    assert facts.pcie_generation is facts.pcie_bytes_per_s is facts.pcie_max_bytes_per_s is None
    assert any("bbbb" in note and "0000:65:00.0" in note for note in facts.notes)


def test_a_mig_instance_has_the_link_of_its_gpu_and_says_so(sys_pci: Path) -> None:
    nvml = FakeNvml(mig=[1, 1])
    nvml.by_uuid = {"MIG-bbbb": "an instance"}
    facts = ask(nvml, sys_pci)
    assert (facts.uuid, facts.pci_bus_id, facts.pcie_max_width) == ("MIG-bbbb", "0000:65:00.0", 16)
    assert [note for note in facts.notes if note.startswith("MIG is on")]


def test_a_gpu_in_mig_mode_that_is_found_whole_says_so_too(sys_pci: Path) -> None:
    assert any(note.startswith("MIG is on") for note in ask(FakeNvml(mig=[1, 1]), sys_pci).notes)
    assert ask(FakeNvml(mig=[0, 1]), sys_pci).notes == ()


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ("driver", "driver_version"),
        ("cuda", "cuda_version"),
        ("generation", "pcie_generation"),
        ("width", "pcie_width"),
        ("max_generation", "pcie_max_generation"),
        ("max_width", "pcie_max_width"),
    ],
)
def test_a_question_that_nvml_refuses_leaves_one_field_and_one_note(sys_pci: Path, answer: str, field: str) -> None:
    whole = ask(FakeNvml(), sys_pci)
    facts = ask(FakeNvml(**{answer: FakeError("Not Supported")}), sys_pci)
    assert getattr(facts, field) is None
    (note,) = facts.notes
    assert "Not Supported" in note
    fields = GpuFacts.__dataclass_fields__
    assert [name for name in fields if getattr(facts, name) != getattr(whole, name)] == [field, "notes"]


def test_a_function_that_an_older_pynvml_lacks_is_a_note(sys_pci: Path) -> None:
    facts = ask(FakeNvml(affinity=AttributeError("no nvmlDeviceGetMemoryAffinity")), sys_pci)
    assert facts.numa_node == 3
    assert "no nvmlDeviceGetMemoryAffinity" in facts.notes[0]


@pytest.mark.parametrize("answer", ["uuid", "pci"])
def test_what_torch_says_stands_in_for_what_nvml_does_not(sys_pci: Path, answer: str) -> None:
    facts = ask(FakeNvml(**{answer: FakeError("Unknown Error")}), sys_pci)
    assert (facts.uuid, facts.pci_bus_id) == ("GPU-bbbb", "0000:65:00.0")


def test_nvml_that_does_not_start_is_a_note_and_is_not_shut_down(sys_pci: Path) -> None:
    nvml = FakeNvml(init=FakeError("Driver Not Loaded"))
    facts = ask(nvml, sys_pci)
    assert nvml.stopped == 0
    assert (facts.name, facts.numa_node, facts.driver_version) == ("NVIDIA H200", 3, None)
    assert "Driver Not Loaded" in facts.notes[0]


def test_nvml_is_shut_down_whatever_happens(sys_pci: Path) -> None:
    nvml = FakeNvml(generation=KeyError("not an error of NVML"))
    with pytest.raises(KeyError):
        gpu_facts(DEVICE, properties=properties(), nvml=nvml, sys_pci=sys_pci)
    assert (nvml.started, nvml.stopped) == (1, 1)


def test_nvml_that_does_not_shut_down_is_a_note(sys_pci: Path) -> None:
    nvml = FakeNvml(shutdown=FakeError("Unknown Error"))
    facts = gpu_facts(DEVICE, properties=properties(), nvml=nvml, sys_pci=sys_pci)
    assert facts.numa_node == 1
    assert facts.notes == ("NVML does not shut down: Unknown Error",)


@pytest.mark.parametrize(
    ("affinity", "node"), [([1], 0), ([8], 3), ([0, 1], 64), ([0] * 15 + [1 << 63], 1023), ([5], 3), ([0], 3)]
)
def test_the_node_is_nvmls_nearest_and_the_kernels_where_nvml_names_none_or_several(
    sys_pci: Path, affinity: list[int], node: int
) -> None:
    facts = ask(FakeNvml(affinity=affinity), sys_pci)
    assert facts.numa_node == node
    assert bool(facts.notes) == (affinity == [5])


def test_the_gpus_own_memory_is_not_the_nearest_host_memory(sys_pci: Path) -> None:
    # Grace Hopper: node 1 is the GPU's memory, and NVML names it beside the processor's node.
    assert ask(FakeNvml(affinity=[0b11], own_node=1), sys_pci).numa_node == 0
    facts = ask(FakeNvml(affinity=[0b1000], own_node=3), sys_pci)
    assert facts.numa_node is None
    assert "says 3" in facts.notes[-1]


@pytest.mark.parametrize("content", ["-1\n", "", "none"])
def test_a_node_that_the_kernel_does_not_know_is_none(sys_pci: Path, content: str) -> None:
    (sys_pci / "0000:65:00.0" / "numa_node").write_text(content)
    facts = ask(FakeNvml(affinity=[]), sys_pci)
    assert facts.numa_node is None
    assert facts.notes[-1].startswith("no NUMA node from the kernel")


def test_the_kernel_is_asked_under_its_own_spelling_of_the_address(sys_pci: Path) -> None:
    (sys_pci / "00ab:0c:1f.0").mkdir()
    (sys_pci / "00ab:0c:1f.0" / "numa_node").write_text("6")
    facts = ask(FakeNvml(affinity=[], pci=SimpleNamespace(domain=0xAB, bus=0x0C, device=0x1F)), sys_pci)
    assert (facts.pci_bus_id, facts.numa_node) == ("00ab:0c:1f.0", 6)


def test_without_an_address_there_is_no_node(sys_pci: Path) -> None:
    nvml = FakeNvml(affinity=[], pci=FakeError("Unknown Error"))
    facts = ask(nvml, sys_pci, pci_bus_id=None)
    assert facts.numa_node is None
    assert "the PCI address is not known" in facts.notes[-1]


def test_without_nvml_the_rest_is_known(sys_pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = gpu_facts(DEVICE, properties=properties(), sys_pci=sys_pci)
    assert (facts.name, facts.uuid, facts.numa_node, facts.cuda_version) == ("NVIDIA H200", "GPU-bbbb", 3, None)
    assert "pip install kvsluice[gpu]" in facts.notes[0]


def test_the_cpu_has_no_facts_and_nobody_is_asked() -> None:
    nvml = FakeNvml(init=AssertionError("asked"))
    facts = gpu_facts(torch.device("cpu"), nvml=nvml)
    assert facts == GpuFacts(notes=("cpu is not a CUDA device",))


def test_on_this_machine_nothing_raises_and_each_missing_fact_has_a_note() -> None:
    facts = gpu_facts(DEVICE)
    if torch.cuda.is_available():
        assert facts.name == torch.cuda.get_device_properties(0).name
    else:
        assert facts.name is None
        assert any("cuda:0" in note for note in facts.notes)
    assert facts.notes or None not in (facts.numa_node, facts.pcie_generation, facts.pcie_width, facts.driver_version)


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    [(1, 1, 0.25), (2, 8, 4.0), (3, 16, 15.754), (4, 16, 31.508), (5, 16, 63.015), (6, 16, 121.0)],
)
def test_the_links_rate_is_that_of_its_lanes(generation: int, width: int, gigabytes: float) -> None:
    now = GpuFacts(pcie_generation=generation, pcie_width=width)
    most = GpuFacts(pcie_max_generation=generation, pcie_max_width=width)
    assert now.pcie_bytes_per_s == pytest.approx(gigabytes * 1e9, rel=1e-4)
    assert most.pcie_max_bytes_per_s == now.pcie_bytes_per_s
    assert now.pcie_max_bytes_per_s is most.pcie_bytes_per_s is None


def test_a_link_of_an_unknown_generation_or_width_has_no_rate() -> None:
    unknown = max(PCIE_LANE_BYTES_PER_S) + 1
    for generation, width in ((None, 16), (5, None), (unknown, 16), (0, 16), (5, 0)):
        assert GpuFacts(pcie_generation=generation, pcie_width=width).pcie_bytes_per_s is None


def calls_of(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if name.startswith("nvml")]


def num_arguments(owner: object, name: str) -> int:
    parameters = inspect.signature(getattr(owner, name)).parameters
    return len([parameter for parameter in parameters if parameter != "self"])


@pytest.mark.parametrize("name", calls_of(Nvml))
def test_pynvml_has_each_call_and_takes_as_many_arguments_as_are_passed(name: str) -> None:
    assert num_arguments(pynvml, name) == num_arguments(Nvml, name) == num_arguments(FakeNvml, name)


def test_pynvmls_error_and_pci_struct_are_as_they_are_used() -> None:
    assert issubclass(pynvml.NVMLError, Exception)
    info = pynvml.nvmlPciInfo_t()
    info.domain, info.bus, info.device = 1, 0x65, 2
    assert (info.domain, info.bus, info.device) == (1, 0x65, 2)


def test_importing_the_module_imports_no_nvml() -> None:
    script = """
import sys, torch
before = set(sys.modules)
import kvsluice.kernels.gpu
print([name for name in set(sys.modules) - before if name.split(".")[0] in ("cuda", "pynvml", "triton")])
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
