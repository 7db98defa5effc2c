"""Starts the compiled program hasten. Nothing of this runs during training.

`cmake_prefix_path` is what CMAKE_PREFIX_PATH needs for find_package(hasten).
"""

import os
import sys
from importlib import metadata, util

cmake_prefix_path = os.path.dirname(os.path.abspath(__file__))


def _torch_libraries():
    """The folder of torch's libraries. Ends the process if torch is another than hasten's."""
    needed = next(r for r in metadata.requires("hasten") if r.startswith("torch=="))
    wanted = needed.removeprefix("torch==").removesuffix(".*")
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found = ""
    if not found.startswith(wanted + "."):
        there = f"torch {found} is installed" if found else "torch is not installed"
        sys.exit(
            f"error: hasten {metadata.version('hasten')} was compiled for torch {wanted}, and "
            f"{there}. Run: {sys.executable} -m pip install '{needed}'"
        )
    return os.path.join(os.path.dirname(util.find_spec("torch").origin), "lib")  # imports nothing


def main():
    libraries = _torch_libraries()
    # The programs look for ../torch/lib. pip may have put the two into different folders.
    if not os.path.isdir(os.path.join(cmake_prefix_path, "..", "torch", "lib")):
        paths = [libraries, os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    program = os.path.join(cmake_prefix_path, "bin", "hasten")
    os.execv(program, [program, *sys.argv[1:]])
