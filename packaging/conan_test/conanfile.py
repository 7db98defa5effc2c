"""Builds the program of tests/install/consumer against the package and runs it."""

import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class HastenTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["HASTEN_LINK"] = (
            "hasten::hasten" if self.dependencies["hasten"].options.shared else "hasten::hasten_static"
        )
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self):
        if can_run(self):
            hasten = os.path.join(self.dependencies["hasten"].package_folder, "bin", "hasten")
            program = os.path.join(self.cpp.build.bindir, "consumer")
            self.run(f"{hasten} launch --nproc 2 {program}", env="conanrun")
