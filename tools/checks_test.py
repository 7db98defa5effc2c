#!/usr/bin/env python3
"""Breaks each rule on purpose in a small tree and sees its check fail.

A check that has gone quiet looks like a clean tree; these cases distinguish them.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parent
CACHE = pathlib.Path(os.environ.get("HASTEN_CACHE") or pathlib.Path.home() / ".cache/hasten")
TIDY = CACHE / "clang-tidy-18.1.8"

GOOD = {
    "docs/architecture.md": "| layer | folders |\n|---|---|\n| 0 | `base` |\n| 1 | `core`, `launch` |\n| 2 | `comm` |\n"
    "| runs | [b.cpp](../src/comm/b.cpp) | `B::run` |\n",
    "include/hasten/base/a.h": "#pragma once\n#include <string>\ninline std::string a() { return {}; }\n",
    "include/hasten/comm/b.h": '#pragma once\n#include "hasten/base/a.h"\n#include <ATen/core/Tensor.h>\ninline at::Tensor b() { a(); return {}; }\n',
    "src/comm/b.cpp": '#include "hasten/comm/b.h"\nint B::run(int a) const {\n  return a;\n}\n',
    "tests/comm/CMakeLists.txt": "hasten_tests(unit b_test.cpp)\n",
    "tests/comm/b_test.cpp": "TEST(B, Holds) {\n  if (none()) {\n    GTEST_SKIP() << \"why\";\n  }\n}\n",
    "examples/loop.cpp": "int main() {\n  // [loop]\n  run();\n  // [/loop]\n}\n",
    "README.md": "<!-- examples/loop.cpp: loop -->\n```cpp\nrun();\n```\n[page](docs/architecture.md)\n",
    "docs/guides/coming-from-python.md": "| Python | hasten | remark |\n|---|---|---|\n"
    "| `a` | `a` | |\n| `jit` | not there | C++ is compiled |\n",
}
# Stands for LibTorch: what check_headers looks at is names.
TORCH = {
    "include/ATen/core/Tensor.h": "#pragma once\nnamespace at { struct Tensor {}; }\n",
    "include/torch/torch.h": "#pragma once\n",
    "include/torch/csrc/api/include/torch/nn.h": "#pragma once\n",
    "include/torch/csrc/api/include/torch/all.h": "#pragma once\n#include <torch/nn.h>\n",
    "include/gloo/context.h": "#pragma once\n",
}


def write(folder, contents):
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class ChecksTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="hasten-checks-")
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name, "tree")
        self.torch = pathlib.Path(self.folder.name, "torch")
        write(self.root, GOOD)
        write(self.torch, TORCH)

    def run_check(self, name, *arguments):
        environment = dict(
            os.environ,
            HASTEN_CACHE=str(pathlib.Path(self.folder.name, "cache")),
            HASTEN_TORCH=str(self.torch),
        )
        command = [sys.executable, TOOLS / f"check_{name}.py", "--root", self.root, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(result.stderr, "")
        return result.returncode, result.stdout

    def assert_good(self, name):
        self.assertEqual(self.run_check(name), (0, ""))

    def assert_bad(self, name, changes, *words):
        self.assert_good(name)
        write(self.root, changes)
        code, output = self.run_check(name)
        self.assertEqual(code, 1, output)
        for word in words:
            self.assertIn(word, output)

    def test_layers_points_up(self):
        self.assert_bad("layers", {"src/base/a.cpp": '#include "hasten/comm/b.h"\n'}, "src/base/a.cpp:1", "layer 2")

    def test_layers_sibling(self):
        self.assert_bad("layers", {"src/launch/l.cpp": '\n#include "hasten/core/c.h"\n'}, "src/launch/l.cpp:2")

    def test_layers_unknown_folder(self):
        self.assert_bad("layers", {"src/utils/u.cpp": "\n"}, "utils")

    def test_layers_libtorch_in_base(self):
        self.assert_bad("layers", {"src/base/a.cpp": "#include <c10/util/Half.h>\n"}, "LibTorch")

    def test_words_plain(self):
        self.assert_bad("words", {"include/hasten/base/w.h": "// Tells whoever waits.\n"}, "whoever")
        (self.root / "include/hasten/base/w.h").unlink()
        self.assert_bad("words", {"include/hasten/base/w.h": "/// Of hsdp: ranks.\n"}, "Of hsdp:")
        for word in ("asked", "behind", "goes on", "of its own"):
            with self.subTest(word):
                self.setUp()
                self.assert_bad("words", {"README.md": f"A rank {word} here.\n"}, f'"{word}"')

    def test_words_plain_in_a_message(self):
        names = 'f(asked, "its own");\n// "behind"\n'
        write(self.root, {"src/comm/b.cpp": names, "README.md": "`asked` is a name.\n"})
        self.assert_bad("words", {"src/comm/b.cpp": 'f("rank 1 is " + n, " behind");\n'}, "behind")

    def test_words_private(self):
        good = 'f(outstanding, returned, "set aside"); // in turn; turns it off; turns a into b\nin_turns();\n'
        write(self.root, {"src/comm/b.cpp": good, "tests/comm/b_test.cpp": "int turn = 0;\n"})
        for word, line in (
            ("lent", "int a_lent = 0;"), ("dealer", "class BatchDealer {"), ("stale", "kWindowStale,"),
            ("told", "// A peer is told."), ("turn", "leave_turn();"), ("serve peers", "void serve_peers();"),
        ):
            with self.subTest(word):
                self.assert_bad("words", {"src/comm/c.h": line + "\n"}, "src/comm/c.h:1", f'"{word}"')
                (self.root / "src/comm/c.h").unlink()

    def test_sizes_header(self):
        self.assert_bad("sizes", {"include/hasten/base/a.h": "\n" * 401}, "the limit is 400")

    def test_sizes_readme(self):
        self.assert_bad("sizes", {"README.md": "x\n" * 151}, "the limit is 150")

    def test_sizes_class(self):
        many = "".join(f"  int f{i}();\n" for i in range(16))
        base = {"include/hasten/comm/b.h": "class B {\n public:\n" + many + "};\n"}
        derived = "class D : public B {\n public:\n" + many.replace("f", "g") + "};\n"
        self.assert_bad(
            "sizes", {**base, "include/hasten/comm/d.h": derived}, "D has 32 public names"
        )
        (self.root / "include/hasten/comm/d.h").unlink()
        hidden = "class D {\n" + many.replace("f", "g") + many + many.replace("f", "h") + "};\n"
        self.assert_bad("sizes", {"src/comm/d.h": hidden}, "D has 48 member functions")
        (self.root / "src/comm/d.h").unlink()
        spread = {f"src/comm/d{i}.cpp": f"void D::f{i}() {{}}\n" for i in range(4)}
        spread["src/comm/d.h"] = "class D {\n" + many + "};\n"
        self.assert_bad("sizes", spread, "D has 4 source files")

    def test_sizes_library(self):
        many = {f"src/text/t{i}.cpp": "\n" * 600 for i in range(28)}
        self.assert_bad("sizes", many, "16800 lines of hasten_text", "the limit is")

        more = "- Lines: +%s in hasten_text, for a family of models.\n"
        write(self.root, {"CHANGELOG.md": more % "10"})
        self.assertEqual(self.run_check("sizes")[0], 1)
        write(self.root, {"CHANGELOG.md": more % "10,000"})
        self.assert_good("sizes")

    def test_sizes_limits_only_fall(self):
        script = "tools/check_sizes.py"
        text = (TOOLS / "check_sizes.py").read_text()
        write(self.root, {script: re.sub(r'\("hasten", \(\), \d+\)', '("hasten", (), 9)', text)})
        self.git("init", "-q")
        self.git("add", script)
        self.git("commit", "-qm", "sizes")
        code, output = self.run_check("sizes")
        self.assertEqual(code, 1, output)
        self.assertIn("the limit of hasten rose from 9 to", output)

    def test_sizes_chain(self):
        chain = {f"src/comm/c{i}.h": f'#include "c{i + 1}.h"\n' for i in range(21)}
        chain["src/comm/c21.h"] = "\n"
        chain["src/comm/c.cpp"] = '#include "c14.h"\n'
        self.assert_bad("sizes", chain, "9 files of one folder, the limit is 8")
        write(self.root, {"src/comm/c.cpp": '#include "c0.h"\n'})
        self.assertIn("a chain of 23 files, the limit is 12", self.run_check("sizes")[1])

    def test_sizes_tables(self):
        rows = {"src/tables/rows.inc": "\n" * 1201}
        self.assert_bad("sizes", rows, "src/tables:1", "1201 lines of generated tables")

    def test_sizes_function(self):
        body = 'void f(\n    int a) const {\n  g("}");  // }\n' + "  if (a) {\n  }\n" * 40 + "}\n"
        self.assert_bad("sizes", {"src/comm/f.cpp": body}, "src/comm/f.cpp:2", "81 lines")

    def test_tests_unregistered(self):
        self.assert_bad("tests", {"tests/comm/c_test.cpp": "\n"}, "c_test.cpp")

    def test_tests_registered_in_a_comment(self):
        self.assert_bad("tests", {"tests/comm/CMakeLists.txt": "# b_test.cpp\n"}, "b_test.cpp")

    def test_tests_absent(self):
        self.assert_bad("tests", {"tests/comm/CMakeLists.txt": "hasten_tests(unit b_test.cpp c_test.cpp)\n"}, "not there")

    def test_tests_disabled(self):
        self.assert_bad("tests", {"tests/comm/b_test.cpp": "TEST(B, DISABLED_Holds) {}\n"}, "switched off")

    def test_tests_silent_skip(self):
        self.assert_bad("tests", {"tests/comm/b_test.cpp": "GTEST_SKIP();\n"}, "reason")

    def test_tests_one_type_twice(self):
        rig = "namespace a {\nnamespace b {\nstruct Rig {\n};\n} // namespace b\n} // namespace a\n"
        other = "namespace a::b {\nstruct Rig {\n  int more;\n};\n} // namespace a::b\n"
        same = {"tests/comm/c_test.cpp": rig, "tests/comm/CMakeLists.txt": "hasten_tests(unit b_test.cpp c_test.cpp)\n"}
        write(self.root, same)
        self.assert_bad("tests", {"tests/comm/b_test.cpp": other}, "c_test.cpp:3", "a::b::Rig", "b_test.cpp")

    def test_words_path(self):
        self.assert_bad("words", {"src/comm/b.cpp": "// see /" + "work/x\n"}, "path of one machine")

    def test_words_promise(self):
        self.assert_bad("words", {"src/comm/b.cpp": "// TO" + "DO later\n"}, "promise")

    def test_words_tracker(self):
        self.assert_bad("words", {"README.md": "as issue" + " 12 says\n"}, "tracker")

    def test_snippets_differ(self):
        self.assert_bad("snippets", {"examples/loop.cpp": "// [loop]\nwalk();\n// [/loop]\n"}, "differs")
        self.run_check("snippets", "--fix")
        self.assert_good("snippets")
        self.assertIn("walk();", (self.root / "README.md").read_text())

    def test_snippets_piece_in_a_piece(self):
        write(self.root, {"examples/loop.cpp": "// [loop]\nrun();\n// [inner]\nwalk();\n// [/inner]\n// [/loop]\n"})
        write(self.root, {"README.md": "<!-- examples/loop.cpp: loop -->\n```cpp\nrun();\nwalk();\n```\n"})
        self.assert_good("snippets")

    def test_snippets_unmarked(self):
        self.assert_bad("snippets", {"README.md": "text\n\n```cpp\nrun();\n```\n"}, "names no compiled file")

    def test_snippets_cmake(self):
        page = "<!-- examples/CMakeLists.txt: use -->\n```cmake\nfind_package(a)\n```\n"
        write(self.root, {"examples/CMakeLists.txt": "if(B)\n  # [use]\n  find_package(a)\n  # [/use]\nendif()\n", "README.md": page})
        self.assert_bad("snippets", {"examples/CMakeLists.txt": "# [use]\nfind_package(b)\n# [/use]\n"}, "differs")

    def test_snippets_cmake_unmarked(self):
        self.assert_bad("snippets", {"README.md": "```cmake\nrun()\n```\n"}, "names no compiled file")

    def test_snippets_diff(self):
        plain = "int main() {\n  // [loop]\n  run();\n  stop();\n  // [/loop]\n}\n"
        ranks = "// [new]\nWorld world; // ranks\n// [/new]\n// [loop]\nrun(world); // ranks\nstop(); // all\n// [/loop]\n"
        page = "<!-- examples/loop.cpp to examples/ranks.cpp: new loop -->\n```diff\n-run();\n+World world;\n+run(world);\n stop();\n```\n"
        files = {"examples/loop.cpp": plain, "examples/ranks.cpp": ranks, "README.md": page}
        write(self.root, files)
        for change, words in (
            ({"README.md": page.replace(" stop();\n", "")}, "differs from examples/loop.cpp to examples/ranks.cpp"),
            ({"examples/ranks.cpp": ranks.replace("world)", "w)")}, "differs"),
            ({"examples/ranks.cpp": ranks.replace("[new]", "[old]")}, "no piece [new]"),
            ({"examples/loop.cpp": plain.replace("[loop]", "[all]")}, "has none of [new loop]"),
            ({"README.md": page.replace("examples/loop.cpp", "examples/none.cpp")}, "none.cpp is not there"),
            ({"README.md": page.replace(" to ", " and ")}, "names no compiled file"),
        ):
            with self.subTest(words):
                self.assert_bad("snippets", change, words)
                write(self.root, files)

    def test_snippets_dead_link(self):
        self.assert_bad("snippets", {"README.md": "[page](docs/none.md)\n"}, "docs/none.md")

    def test_snippets_dead_anchor(self):
        heading = "# Where `it` is: [there](b.md)\n\n```sh\n# no heading\n```\n"
        for link in ("docs/a.md#where-it-is-there", "#top"):
            write(self.root, {"docs/a.md": heading, "README.md": f"# Top\n\n[a]({link})\n", "docs/b.md": ""})
            self.assert_good("snippets")
        for link in ("docs/a.md#where-it-is", "docs/a.md#no-heading", "#down"):
            write(self.root, GOOD)
            self.assert_bad("snippets", {"README.md": f"# Top\n\n[a]({link})\n"}, link)

    def assert_place(self, text, *words):
        self.assert_bad("places", {"src/comm/b.cpp": text}, "architecture.md:6", *words)

    def test_places_moved(self):
        self.assert_place("void run() {}\n", "src/comm/b.cpp does not define B::run")

    def test_places_called_or_declared_only(self):
        for text in (
            "void f() {\n  B::run(1);\n}\n",
            "int B::run(int a);\nint b() { return 0; }\n",
            "// int B::run(int a) {}\n",
            "int A::B::run() {}\n",
        ):
            with self.subTest(text):
                self.setUp()
                self.assert_place(text, "B::run")

    def test_places_file_gone(self):
        row = "| runs | [c.cpp](../src/comm/c.cpp) | `B::run` |\n"
        self.assert_bad("places", {"docs/architecture.md": row}, "src/comm/c.cpp is not there")

    def test_places_row_without_a_function(self):
        self.assert_bad("places", {"docs/architecture.md": "| runs | [b](../src/comm/b.cpp) | run |\n"}, "names no function")

    def test_places_no_table(self):
        self.assert_bad("places", {"docs/architecture.md": "text\n"}, "no table")

    def map_row(self, hasten, remark="r"):
        page = "| Python | hasten | remark |\n|---|---|---|\n"
        return {"docs/guides/coming-from-python.md": f"{page}| `x` | {hasten} | {remark} |\n"}

    def test_mapping_names(self):
        header = "struct Base {\n  int old, x;\n};\nclass Box : public Base {\n  int lid;\n};\nint f(); // gone\n"
        source = '// --no-flag\nvoid g() { flag("--size,--rows"); run("train"); getenv("HASTEN_X"); }\n'
        write(self.root, {"include/hasten/base/m.h": header, "src/base/m.cpp": source})
        for name in ("Box::lid", "Box::old", "hasten::f", "f()", "--rows", "hasten train --size",
                     "HASTEN_X", "hasten/base/m.h", "torch::save"):
            with self.subTest(name):
                write(self.root, self.map_row(f"`{name}`", ""))
                self.assert_good("mapping")
        page, row = self.map_row("the same, in `Box`", "").popitem()
        write(self.root, {page: row + "\n| what | hasten | there |\n|---|---|---|\n| a | 1 | 2 |\n"})
        self.assert_good("mapping")
        self.assert_bad("mapping", self.map_row("the same, in `Bag`", ""), "md:3", "Bag::x")
        write(self.root, self.map_row("the same", ""))
        self.assert_good("mapping")
        page, row = self.map_row("the same", "").popitem()
        self.assert_bad("mapping", {page: row.replace("`x`", "`y`")}, "md:3", "y is not in include/")
        for name in ("Box::f", "Bag::lid", "gone", "--no-flag", "hasten fly", "HASTEN_Y",
                     "hasten/base/n.h", "f(1)", "Base::lid"):
            with self.subTest(name):
                write(self.root, GOOD)
                self.assert_bad("mapping", self.map_row(f"`f`, `{name}`"), "md:3", name)

    def test_mapping_rows(self):
        for row in (self.map_row("not there", ""), self.map_row("nothing"), self.map_row("")):
            self.assert_bad("mapping", row, "md:3", "needs a name")
            write(self.root, GOOD)
        self.assert_bad("mapping", self.map_row("`a`", "b | c"), "4 columns")
        write(self.root, GOOD)
        self.assert_bad("mapping", {"docs/guides/coming-from-python.md": "text\n"}, "no table")

    def arguments_page(self, rest):
        page = "| Python | hasten | remark |\n|---|---|---|\n"
        page = f"## transformers\n\n### TrainingArguments\n\n{page}| `old` | the same, in `Box` | |\n| `b` | `old` | |\n"
        return {"docs/guides/coming-from-python.md": f"{page}\n### Not there\n\n{rest}"}

    def test_mapping_arguments(self):
        rest = "- No such thing: `c`, `d` and `e` (a\n  note)\n- Always so: `f`\n- `g`: why\n"
        table = ("class,name,state,hasten,flag,remark\n" + "".join(f"TrainingArguments,{row}\n" for row in (
            "old,has,Box::old,--old,", "b,other name,old,,", "c,refused,,,No such thing", "d,refused,,,a note",
            "e,refused,,,a note", "f,always so,,,", "g,refused,,,why")))
        source = {"include/hasten/base/m.h": "struct Box {\n  int old;\n};\n", "src/base/m.cpp": 'void g() { f("--old"); }\n'}
        write(self.root, source | self.arguments_page(rest) | {"docs/arguments.csv": table})
        self.assert_good("mapping")
        self.assert_bad("mapping", self.arguments_page(rest.replace("`f`", "`h`")), "md:1", "has no TrainingArguments.f")
        write(self.root, self.arguments_page(rest))
        self.assert_bad("mapping", self.arguments_page(rest.replace("why", "how")), "arguments.csv:1", "differs from the page")

    def test_headers_missing_include(self):
        self.assert_bad("headers", {"include/hasten/base/c.h": "#pragma once\nstd::string c();\n"}, "c.h:1", "std")

    def test_headers_missing_include_beside_the_same_heavy_one(self):
        text = "#pragma once\n#include <ATen/core/Tensor.h>\nstd::string c(at::Tensor);\n"
        self.assert_bad("headers", {"include/hasten/comm/c.h": text, "include/hasten/comm/d.h": text}, "c.h:1", "d.h:1")

    def test_headers_no_pragma_once(self):
        self.assert_bad("headers", {"include/hasten/base/c.h": "struct C {};\n"}, "c.h:1", "redefinition")

    def test_headers_heavy(self):
        for heavy in ("torch/torch.h", "torch/all.h", "gloo/context.h"):
            with self.subTest(heavy):
                self.assert_bad(
                    "headers", {"include/hasten/comm/c.h": f"#pragma once\n#include <{heavy}>\n"}, "brings in"
                )
                (self.root / "include/hasten/comm/c.h").unlink()

    def test_headers_heavy_through_a_shared_one(self):
        text = "#pragma once\n#include <torch/all.h>\n"
        self.assert_bad("headers", {"include/hasten/comm/c.h": text, "include/hasten/comm/d.h": text}, "c.h", "d.h")

    def test_headers_parallel_for(self):
        self.assert_bad(
            "headers", {"include/hasten/comm/c.h": "#pragma once\n#define C at::parallel_for\n"}, "parallel_for"
        )

    def test_headers_remembers_good_ones_only(self):
        self.assert_bad("headers", {"include/hasten/base/a.h": "std::string a();\n"}, "a.h", "b.h")
        self.assertEqual(self.run_check("headers")[0], 1)

    @unittest.skipUnless(TIDY.is_dir(), "clang-tidy is not there: scripts/setup.sh fetches it")
    def test_tidy(self):
        write(
            self.root,
            {
                "CMakeLists.txt": "cmake_minimum_required(VERSION 3.25)\nproject(t CXX)\nadd_library(t src/comm/c.cpp)\n",
                "CMakePresets.json": '{"version": 6, "configurePresets": [{"name": "dev", "generator": "Ninja",'
                ' "cacheVariables": {"CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}}]}',
                ".clang-tidy": (TOOLS.parent / ".clang-tidy").read_text(),
                "src/comm/c.cpp": "double c(int a) { return a / 2; }\n",
            },
        )
        (self.root / "src/comm/b.cpp").unlink()
        tidy = pathlib.Path(self.folder.name, "cache", TIDY.name)
        tidy.parent.mkdir(exist_ok=True)
        tidy.symlink_to(TIDY)
        code, output = self.run_check("tidy")
        self.assertEqual(code, 1)
        self.assertIn("c.cpp:1: result of integer division", output)
        write(self.root, {"src/comm/c.cpp": "double c(double a) { return a / 2; }\n"})
        self.assertEqual(self.run_check("tidy"), (0, ""))

    def git(self, *command):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", self.root, *identity, *command], check=True)

    def test_headers_that_a_commit_has_are_good(self):
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-qm", "good")
        self.assertEqual(self.run_check("headers", "--remember"), (0, ""))
        self.assertEqual(len((self.root / ".headers").read_text().strip()), 40)
        # What includes the changed one is compiled again, and what is bad is not remembered.
        write(self.root, {"include/hasten/base/a.h": "#pragma once\nstd::string a();\n"})
        code, output = self.run_check("headers", "--remember")
        self.assertEqual(code, 1)
        for header in ("base/a.h", "comm/b.h"):
            self.assertIn(header, output)

    def test_cpu_minutes(self):
        clock = [sys.executable, TOOLS / "cpu_minutes.py"]
        parts = pathlib.Path(self.folder.name, "parts")
        work = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\nraise SystemExit(7)"]
        self.assertEqual(subprocess.run([*clock, "run", parts, "busy", *work]).returncode, 7)
        name, seconds = parts.read_text().split()
        self.assertEqual(name, "busy")
        self.assertGreaterEqual(float(seconds), 0.3)
        for sample, good in ((5, False), (50, True)):  # on a machine that is ten times as slow
            parts.write_text(f"sample {sample}\nchecks 900.0\nbusy 20.0\n")
            result = subprocess.run([*clock, "report", parts], capture_output=True, text=True)
            self.assertEqual(result.returncode == 0, good, result.stdout)
            self.assertEqual("error: checks takes more" in result.stdout, not good)

    def run_report(self, *tests):
        """tests: (name, label, status, output)."""
        entries = "".join(
            f'<testcase name="{name}" time="7" status="{status}"><properties><property '
            f'name="cmake_labels" value="{label}"/></properties>'
            f"<system-out>{output}</system-out></testcase>"
            for name, label, status, output in tests
        )
        path = pathlib.Path(self.folder.name, "ctest.xml")
        path.write_text(f"<testsuite>{entries}</testsuite>")
        result = subprocess.run([sys.executable, TOOLS / "test_report.py", path], capture_output=True, text=True)
        return result.returncode, result.stdout

    def test_report_counts_and_names_skips(self):
        unit = "a_test.cpp:3: Skipped\nno disk\n[  SKIPPED ] A.B (0 ms)\n[==========] 5 tests from 2 test suites ran. (1 ms total)\n[  SKIPPED ] A.B\n"
        world = "[  SKIPPED ] C.D (1 ms)\n[  SKIPPED ] C.D: one rank\n[==========] 3 cases ran on 2 ranks: 2 passed, 0 failed, 1 skipped.\n"
        code, output = self.run_report(("unit", "unit", "run", unit), ("world2", "dist;world2", "run", world))
        self.assertEqual(code, 0, output)
        for line in ("unit: 4 cases", "dist: 2 cases", "skipped: unit A.B: no disk", "skipped: world2 C.D: one rank"):
            self.assertIn(line + "\n", output)

    def test_report_names_the_ten_slowest(self):
        cases = "".join(f"[       OK ] A.B{i} ({i}00 ms)\n" for i in range(30, 42))
        code, output = self.run_report(("unit", "unit", "run", cases), ("demo", "demo", "run", "no cases"))
        self.assertEqual(code, 0, output)
        slow = [line for line in output.splitlines() if line.startswith("slow: ")]
        self.assertEqual(slow[0], "slow: 7.0 s demo")
        self.assertEqual(slow[1:], [f"slow: {i / 10:.1f} s unit A.B{i}" for i in range(41, 32, -1)])

    def run_changed(self, *changes):
        """What sanitize.sh --changed says in a repository whose first commit was sanitized."""
        git = ["git", "-C", self.root, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        for script in ("common.sh", "sanitize.sh"):
            write(self.root, {f"scripts/{script}": (TOOLS.parent / "scripts" / script).read_text()})
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            subprocess.run(git + command, check=True)
        first = subprocess.run(git + ["rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
        write(self.root, {".sanitized": first})
        write(self.root, dict(changes))
        command = ["bash", self.root / "scripts/sanitize.sh", "--changed"]
        result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, HOME=self.folder.name))
        self.assertEqual(result.stderr, "")
        return result.returncode, result.stdout

    def test_sanitize_looks_at_what_changed(self):
        for change, lower in (
            ("src/base/a.cpp", True),
            ("include/hasten/base/a.h", True),
            ("tests/comm/b_test.cpp", True),
            ("tests/support/new.h", True),
            ("scripts/sanitize.sh", True),
            ("src/trainer/a.cpp", False),
            ("docs/architecture.md", False),
        ):
            with self.subTest(change):
                self.setUp()
                old = self.root / change
                text = old.read_text() if old.exists() else ""
                if change == "scripts/sanitize.sh":
                    text = (TOOLS.parent / change).read_text()
                code, output = self.run_changed((change, text + "\n"))
                self.assertEqual((code, output), (0, change + "\n") if lower else (1, ""))

    def test_sanitize_of_an_unknown_commit(self):
        code, output = self.run_changed((".sanitized", "0" * 40 + "\n"))
        self.assertEqual((code, output), (0, "everything\n"))

    def test_report_label_that_ran_nothing(self):
        none = "[==========] 0 tests from 0 test suites ran. (0 ms total)\n"
        for test in (("unit", "unit", "run", none), ("demo", "demo", "notrun", "no reason\n")):
            with self.subTest(test):
                code, output = self.run_report(("plain", "plain", "run", ""), test)
                self.assertEqual(code, 1)
                self.assertIn(f"the label {test[1]} ran no case", output)
        offline = ("demo", "demo", "notrun", "error: pip could not fetch x==1. Is the network out?\n")
        code, output = self.run_report(("plain", "plain", "run", ""), offline)
        self.assertEqual(code, 0)
        self.assertIn("skipped: demo: error: pip could not fetch x==1", output)


if __name__ == "__main__":
    unittest.main()
