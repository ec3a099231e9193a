# SPDX-License-Identifier: Apache-2.0
"""The supported releases, read from patches/<release>/release.toml."""

import tomllib
from pathlib import Path

import pytest

from conftest import NEW, OLD, ROOT, World
from offload_parity import release
from offload_parity.errors import UserError


def test_newest_is_the_default_by_version_not_by_name(world: World) -> None:
    (world.patches / OLD).rename(world.patches / "9.10.0")
    facts = world.patches / "9.10.0" / "release.toml"
    facts.write_text(facts.read_text().replace(OLD, "9.10.0"))
    assert [r.version for r in release.supported()] == ["9.10.0", NEW]
    assert release.default().version == release.get(None).version == "9.10.0"


def test_leading_v_is_accepted(world: World) -> None:
    assert release.get(f"v{OLD}").version == OLD


@pytest.mark.parametrize(
    ("wanted", "near"), [("9.7.3", OLD), ("10.0.0", NEW), ("9.9.1", NEW), ("1", OLD)]
)
def test_unsupported_names_supported_and_nearest(
    world: World, wanted: str, near: str
) -> None:
    with pytest.raises(UserError) as error:
        release.get(wanted)
    assert f"{wanted} is not supported (supported: {NEW}, {OLD}" in str(error.value)
    assert f"nearest is {near})" in str(error.value)


def test_space_around_a_version_is_left_out(world: World) -> None:
    assert release.get(f"{OLD} ").version == OLD
    assert f"vLLM {OLD}" in world.good("apply", "--release", f" {OLD} ")
    assert "RELEASE= is empty" in world.refused("apply", "--release", " ")


def test_folder_whose_version_is_none(world: World) -> None:
    (world.patches / OLD).rename(world.patches / "foo")
    facts = world.patches / "foo" / "release.toml"
    facts.write_text(facts.read_text().replace(OLD, "foo"))
    err = world.refused("apply")
    assert "Invalid version: 'foo'" in err and "foo/release.toml" in err


@pytest.mark.parametrize("name", ["CACHE", "BUILD", "PATCHES"])
def test_folder_in_a_home_that_is_not_known(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"OFFLOAD_PARITY_{name}", "~nosuchuser/x")
    err = world.refused("apply")
    assert "no home folder is known" in err and f"OFFLOAD_PARITY_{name}" in err


def test_home_is_not_needed_where_the_cache_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert "Applied" in world.good("apply")


def test_other_faults_of_the_system_are_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_) -> None:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(release, "supported", fail)
    assert "Permission denied: '/some/file'" in world.refused("apply")


def test_no_version_at_all(world: World) -> None:
    err = world.refused("apply", "--release", "main")
    assert f"vLLM main is not supported (supported: {NEW}, {OLD})" in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sha256", "sha", "the key 'sha256' is missing"),
        ("[lint]", "[lint", "Expected ']'"),
        (f'"{NEW}"', '"1.0"', "the folder is named '9.9.0'"),
    ],
)
def test_bad_facts_name_the_file(world: World, old: str, new: str, words: str) -> None:
    facts = world.patches / NEW / "release.toml"
    facts.write_text(facts.read_text().replace(old, new, 1))
    err = world.refused("fetch")
    assert words in err and "9.9.0/release.toml" in err


def test_no_release_at_all(world: World) -> None:
    for facts in world.patches.glob("*/release.toml"):
        facts.unlink()
    assert "expected <release>/release.toml" in world.refused("apply")


@pytest.mark.parametrize("folder", sorted(ROOT.glob("patches/*")), ids=lambda p: p.name)
def test_own_releases_can_be_read(folder) -> None:
    found = release.read(folder)
    assert len(found.sdist_sha256) == 64 and found.sdist_name.endswith(".tar.gz")
    # every key is one that is read
    facts = tomllib.loads((folder / "release.toml").read_text())
    top = {"version", "upstream_commit", "sdist", "unit_tests", "lint"}
    assert set(facts) - {"e2e"} == top | {"deepseek_v4"}
    assert set(facts["deepseek_v4"]) == {"block_bytes"}
