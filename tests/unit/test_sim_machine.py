"""Machine files: what is in the package is whole; what is wrong with one's own is told."""

import re

import pytest

from uniep.errors import ConfigError
from uniep.sim import load_machine, machines
from uniep.sim.machine import KEYS, checked, parse_changes

SOURCES = re.compile(r"#.*(\[[A-Z]\]|estimate|arXiv|hiascend)")


def values(**changes):
    return {**load_machine("ascend-a3").values, **changes}


@pytest.mark.parametrize("name", ["h100-node", "h200-node", "h100-cluster", "ascend-a3"])
def test_machines_of_the_package(name):
    from importlib import resources

    assert name in machines()
    machine = load_machine(name)
    assert {key for key in machine.values if "_ep" not in key} == set(KEYS)
    text = (resources.files("uniep.sim") / "machines" / f"{name}.toml").read_text()
    for line in text.splitlines():
        if re.match(r"\w+ =", line):
            assert SOURCES.search(line), f"{line} has no source"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"link_gbps": -1.0}, r"link_gbps is -1; it must be a number of 0.01 to 100000 GB/s \(links of a die"),
        ({"link_gbps": float("nan")}, "link_gbps is nan; it must be"),
        ({"link_gbps": float("inf")}, "link_gbps is inf; it must be"),
        ({"link_gbps": "fast"}, "link_gbps is 'fast'; it must be a number"),
        ({"link_gbps": True}, "link_gbps is True"),
        ({"matrix_workers": 24.5}, "matrix_workers is 24.5; it must be a whole number of 1 to 4096 workers"),
        ({"matrix_workers": 0}, "matrix_workers is 0"),
        ({"link_gpbs": 1.0}, "link_gpbs is not a key; did you mean link_gbps?"),
        ({"hbm_gbps_ep4": 1.0}, "hbm_gbps_ep4 is not a key; did you mean hbm_gbps?"),
        ({"foo": 3}, "foo is not a key; keys: .*hbm_gbps, .*link_gbps, "),
        ({"all_to_all_gbps_ep8": 0.0}, "all_to_all_gbps_ep8 is 0; it must be"),
        ({"hbm_efficiency": 1.5}, "hbm_efficiency is 1.5; it must be a number of 0.01 to 1 "),
        ({"link_gbps": [1]}, "link_gbps is"),
    ],
)
def test_a_bad_key_is_told_with_unit_and_range(changes, told):
    with pytest.raises(ConfigError, match=told):
        checked("mine", values(**changes))


def test_all_missing_keys_at_once():
    left = {key: value for key, value in values().items() if key not in ("link_gbps", "task_us")}
    with pytest.raises(ConfigError, match=r"link_gbps is missing; give 0.01 to 100000 GB/s .*task_us is missing"):
        checked("mine", left)


def test_files_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in values(link_gbps=100).items()))
    assert load_machine(str(path)).link_gbps == 100 and load_machine(str(path)).name == "mine"
    path.write_text("link_gbps = ")
    with pytest.raises(ConfigError, match="mine: not TOML"):
        load_machine(str(path))
    with pytest.raises(ConfigError, match=r"no.toml.*name a TOML file, or one of ascend-a3"):
        load_machine(str(tmp_path / "no.toml"))
    with pytest.raises(ConfigError, match="machine 'h300' is unknown; use ascend-a3"):
        load_machine("h300")


def test_changes():
    machine = load_machine("ascend-a3", parse_changes(["link_gbps=78.4", "matrix_workers=20"]))
    assert machine.link_gbps == 78.4 and machine.matrix_workers == 20
    kept = load_machine("ascend-a3")
    assert kept.of("all_to_all_gbps", 8) != kept.of("all_to_all_gbps", 32) == kept.all_to_all_gbps
    everywhere = kept.replaced({"all_to_all_gbps": 100.0})
    assert {everywhere.of("all_to_all_gbps", ep) for ep in (4, 8, 16, 32)} == {100.0}
    at_eight = kept.replaced({"all_to_all_gbps_ep8": 100.0})
    assert at_eight.of("all_to_all_gbps", 8) == 100 and at_eight.of("all_to_all_gbps", 4) == kept.of(
        "all_to_all_gbps", 4
    )
    for bad in ("link_gbps", "link_gbps=", "link_gbps=fast", "matrix_workers=2.5"):
        with pytest.raises(ConfigError, match=re.escape(bad.partition("=")[0])):
            load_machine("ascend-a3", parse_changes([bad]))


def test_speeds_of_a_worker():
    speeds = load_machine("ascend-a3").speeds
    assert speeds.flops == pytest.approx(307e3 / 24) and speeds.memory == pytest.approx(1759.2 * 0.6 / 24)
    assert speeds.peer == 8.17 and speeds.task_ns == 100
