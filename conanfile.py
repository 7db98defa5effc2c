"""Conan recipe. LibTorch is not a Conan package: the option `torch` or the environment variable
HASTEN_TORCH names its folder, and the other libraries come from the system:

    conan create . -s compiler.cppstd=20 -o "hasten/*:torch=/folder/of/libtorch"
"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load
from conan.tools.system.package_manager import Apt

required_conan_version = ">=2.4"


class Hasten(ConanFile):
    name = "hasten"
    description = "The training layer for LibTorch"
    license = "Apache-2.0"
    topics = ("training", "distributed", "libtorch", "pytorch")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    # The package has both kinds of libraries; `shared` selects what a consumer links.
    options = {"shared": [True, False], "torch": ["ANY"]}
    default_options = {"shared": True, "torch": ""}
    exports_sources = (
        "CMakeLists.txt", "LICENSE", "*.md", "cmake/*", "include/*", "src/*", "docs/*", "examples/*",
        "packaging/completion/*",
    )
    test_package_folder = "packaging/conan_test"

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "CMakeLists.txt"))
        self.version = re.search(r"project\(hasten VERSION ([0-9.]+)", text)[1]

    def layout(self):
        cmake_layout(self)

    @property
    def _torch(self):
        return str(self.options.torch) or os.environ.get("HASTEN_TORCH", "")

    def package_id(self):
        # The folder's name is not part of the binary. LibTorch's version is hasten's own fact.
        self.info.options.rm_safe("torch")
        self.info.options.rm_safe("shared")

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("hasten runs on Linux")
        check_min_cppstd(self, 20)

    def validate_build(self):
        if not os.path.isfile(os.path.join(self._torch, "lib", "libtorch_cpu.so")):
            raise ConanInvalidConfiguration(
                f"torch={self._torch} is no folder with LibTorch's include/ and lib/. "
                "Set -o 'hasten/*:torch=FOLDER' or HASTEN_TORCH"
            )

    def system_requirements(self):
        Apt(self).check([
            "nlohmann-json3-dev", "libcli11-dev", "libutf8proc-dev", "libonig-dev",
            "libsodium-dev", "libjemalloc-dev", "libxxhash-dev", "zlib1g-dev", "libcurl4-openssl-dev",
            "ninja-build",
        ])

    def generate(self):
        toolchain = CMakeToolchain(self, generator="Ninja")
        toolchain.user_presets_path = False
        # -m64 is the default anyway, and ccache finds the objects of other builds without it.
        toolchain.blocks.remove("arch_flags")
        for name in ("TESTS", "EXAMPLES", "BENCHMARKS"):
            toolchain.cache_variables[f"HASTEN_{name}"] = False
        toolchain.cache_variables["HASTEN_TORCH"] = self._torch
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # hasten's own package files know LibTorch; Conan's would not.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/hasten"]
        self.cpp_info.bindirs = ["bin"]
        self.cpp_info.libs = []
        self.buildenv_info.append_path("CMAKE_PREFIX_PATH", self.package_folder)
        if self._torch:
            self.buildenv_info.define("HASTEN_TORCH", self._torch)
