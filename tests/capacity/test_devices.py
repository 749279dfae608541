"""GPUs and links as data."""

from __future__ import annotations

import pytest

from pdserve.capacity.devices import device, device_by_driver_name, devices, link, links_of
from pdserve.core.errors import ConfigError


def test_every_device_has_plausible_numbers_and_a_source() -> None:
    for name, one in devices().items():
        assert one.source, name
        assert 0 < one.flops_per_s["float32"] <= one.flops_per_s["bfloat16"] <= one.flops_per_s["int8"]
        assert one.bytes_per_s > 1e10
        assert one.memory_bytes > 1e9
        assert (one.price_per_hour is None) == (one.price_source is None)
        if one.nvlink_bytes_per_s and one.pcie_bytes_per_s:
            assert one.nvlink_bytes_per_s > one.pcie_bytes_per_s


def test_peaks_are_of_dense_products() -> None:
    assert device("h100-sxm").peak("bfloat16") == pytest.approx(990e12, rel=0.01)  # the data sheet prints 1,979 with sparsity
    assert device("h100-sxm").peak("float16") == device("h100-sxm").peak("bfloat16")
    assert device("a100-80").peak("fp8") == device("a100-80").peak("bfloat16")  # it has no products in fp8


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--gpu 'h900'.*h100-sxm"):
        device("h900")


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"), ("NVIDIA A10G", "a10g"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_drivers_names_are_known(driver_name: str, name: str) -> None:
    found = device_by_driver_name(driver_name)
    assert found is not None
    assert found.name == name


def test_other_drivers_names_are_not_guessed() -> None:
    assert [device_by_driver_name(name) for name in ("", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA A10")] == [None] * 4


def test_a_link_is_a_name_or_a_rate() -> None:
    h100 = device("h100-sxm")
    assert link("NVLink", h100, 4).bytes_per_s == 4 * 450e9
    assert link("400gbe", h100, 4).bytes_per_s == 50e9
    assert link("400Gbit/s", h100, 4).bytes_per_s == link("50GB/s", h100, 1).bytes_per_s == link("5e10", h100, 1).bytes_per_s
    assert [one.name for one in links_of(device("l4"), 1)] == ["pcie", "400gbe", "200gbe", "100gbe", "25gbe"]


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e400", "2PB/s", "GB/s", "1e16", "infiniband"])
def test_a_bad_link_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--link"):
        link(text, device("h100-sxm"), 1)


def test_a_link_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--link nvlink .* l4 has none"):
        link("nvlink", device("l4"), 1)
