# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment of this project's own tools from pyproject.toml.

Runs on the user's interpreter, so it uses the standard library only and parses on an
old Python too.
"""

import os
import shutil
import subprocess
import sys

NEEDS = (3, 11)
USAGE = "usage: tools_venv.py [--version] [-h] FOLDER [GROUP of pyproject.toml]"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def fail(message):
    """Say what is wrong and stop."""
    sys.exit("error: " + message)


def main(folder, group="tools"):
    """Make the environment in ``folder``; ``.ready`` in it says that it is whole.

    Another ``group`` is installed into it, and a file of its name says so.
    """
    if sys.version_info < NEEDS:
        fail(
            "Python %d.%d or newer is needed, %s is %s: name another with HOST_PYTHON="
            % (*NEEDS, sys.executable, sys.version.split()[0])
        )
    import tomllib

    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError as error:
        fail(
            "%s lacks the module %s: install it (Debian and Ubuntu: apt install "
            "python3-venv) or name another Python with HOST_PYTHON="
            % (sys.executable, error.name)
        )

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        pins = tomllib.load(file)["dependency-groups"][group]
    ready = os.path.join(folder, ".ready" if group == "tools" else "." + group)
    wanted = "\n".join([sys.version.split()[0], *pins])
    if os.path.exists(ready):
        with open(ready) as file:
            if file.read() == wanted:
                # Only the time of a file changed, as after a git checkout.
                os.utime(ready)
                return
    if group == "tools":
        print(
            "Installing this project's tools into %s (once, 100 MB on disk)" % folder,
            flush=True,
        )
        shutil.rmtree(folder, ignore_errors=True)
        try:
            venv.create(folder, with_pip=True, symlinks=os.name != "nt")
        except (OSError, subprocess.CalledProcessError) as error:
            fail("cannot make %s: %s" % (folder, error))
    else:
        print("Installing %s into %s" % (", ".join(pins), folder), flush=True)
    pip = [os.path.join(folder, "bin", "python"), "-m", "pip", "-qq"]
    pip += ["--disable-pip-version-check", "install"]
    if subprocess.call(pip + pins):
        fail(
            "the tools could not be installed (see above): check the network and pip's "
            "settings (%s -m pip config list), then run again" % sys.executable
        )
    with open(ready, "w") as file:
        file.write(wanted)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from offload_parity import version

        print(version())
    elif arguments in (["-h"], ["--help"]):
        print(USAGE + "\n\n" + __doc__.strip())
    elif len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        print("error: " + USAGE, file=sys.stderr)
        sys.exit(2)
    else:
        main(*arguments)
